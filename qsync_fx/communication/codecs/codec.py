"""Interface of gradient codecs, which convert n values to bytes and back, in units with a scale.

Invariant: a codec has no state. NaN and infinity stay non-finite, or make their unit NaN, and leave
the error feedback unchanged. All tensors are on one device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Feedback = Tensor | None  # error feedback, FP32, with the shape of the values


@dataclass(frozen=True)
class Draw:
    """Position in the random streams: 64-bit seed, 32-bit stream, index of the first value."""

    seed: int = 0
    stream: int = 0
    first: int = 0


class Codec(ABC):
    """Codec of gradients; a subclass is a frozen dataclass."""

    name: str
    residual: ClassVar[bool] = False  # whether it has error feedback, added to the next gradient
    # Whether ranks sum full gradients themselves, because coding the mean again would bias it.
    gathered: ClassVar[bool] = False
    # Whether it encodes in host memory on every device: gloo sends its messages.
    on_host: ClassVar[bool] = False

    @property
    @abstractmethod
    def unit(self) -> int:
        """Number of values between allowed cuts of a tensor."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Return the number of bytes for n values; a multiple of four."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        """Encode FP32 values into `wire`, uint8, at least `nbytes` long.

        The error feedback `residual`, FP32, is added to the values and replaced by their error.
        """

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        """Decode `wire` into `values`, 1-D, FP32; with `add`, add to them.

        With `last`, the values are not read soon, so that stores may bypass the caches.
        """

    def settle(self, values: Tensor) -> Tensor:
        """Round FP32 means in place to the codec's format and return them; default: unchanged."""
        return values

    def fitted(self, shape: Sequence[int]) -> Codec:
        """Return the codec for a parameter of this shape."""
        return self

    def columns(self, gradient: Tensor) -> Tensor | None:
        """Return a view of a gradient in coding order; None if memory order is coding order."""
        return None

    def variance(self, values: Tensor) -> float:
        """Return the expected squared error for FP32 values, summed over them."""
        return float((self._coded(values) - values).double().square().sum())

    def prepare(self, device: torch.device) -> None:
        """Compile the kernels for a device ahead of the first step."""
        if device.type != "cpu":
            self._coded(torch.zeros(3 * self.unit, dtype=torch.float32, device=device))

    def _coded(self, values: Tensor) -> Tensor:
        wire = torch.zeros(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        result = torch.empty_like(values)
        self.encode(values, wire, Draw(), torch.zeros_like(values) if self.residual else None)
        self.decode(wire, result)
        return result

    def theory(self, n: int) -> float:
        """Return the number of bytes for n values according to the paper."""
        return self.nbytes(n)
