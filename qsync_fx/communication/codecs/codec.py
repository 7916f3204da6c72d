"""What a codec of gradients is.

A codec turns n values into bytes and back. Values are coded in units, a scale or two means for each, and a tensor may be cut between units:
the parts make the same bytes as the whole.

Invariant: a codec has no state. What is random is drawn by seed, stream and the index of the value; what is left of a value that cannot be
sent goes into a residual that the caller keeps. A NaN or an infinity stays one, or becomes NaN with the unit it is in, and leaves the
residual as it was: such a gradient is not used.
Values, what is left of them and bytes lie on one device: those of the CPU are coded by kernels, those of others by torch operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Where random numbers come from.

    Attributes:
        seed, stream: 64 and 32 bits.
        first: the index of the first value.
    """

    seed: int = 0
    stream: int = 0
    first: int = 0


class Codec(ABC):
    """One way to write gradients; a subclass is a frozen dataclass.

    Attributes:
        name: what users write.
        residual: whether it says what it leaves of a value, to be sent with the next gradient.
        gathered: whether all ranks are sent all of a gradient, and sum it themselves, as coding a mean once more would bias it.
    """

    name: str
    residual: ClassVar[bool] = False
    gathered: ClassVar[bool] = False

    @property
    @abstractmethod
    def unit(self) -> int:
        """Between how many values a tensor may be cut."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Returns how many bytes n values make; a multiple of four."""

    @abstractmethod
    def encode(
        self, values: Tensor, wire: Tensor, draw: Draw, residual: Tensor | None = None
    ) -> None:
        """Writes FP32 `values` into the bytes of `wire`, with `residual` added to them, which takes what is left."""

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        """Reads FP32 `values` from the bytes of `wire`, or adds them to what is there.

        Args:
            last: whether nobody reads them soon, so that they may be written past the caches.
        """

    def settle(self, values: Tensor) -> Tensor:
        """Makes of FP32 `values`, in place, what a mean is behind this codec, and returns them."""
        return values

    def fitted(self, shape: Sequence[int]) -> Codec:
        """Returns the codec for a parameter of this shape."""
        return self

    def columns(self, gradient: Tensor) -> Tensor | None:
        """Returns the view of a gradient whose values lie in the order they are coded in; None where that is as they lie in memory."""
        return None

    def variance(self, values: Tensor) -> float:
        """Returns what the codec adds to FP32 values in the mean square, summed over them; of one that rounds at random the variance.

        Where there is a residual it is what is left for the next gradient, and nothing is lost.
        """
        wire = torch.zeros(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        result = torch.empty_like(values)
        self.encode(values, wire, Draw(), torch.zeros_like(values) if self.residual else None)
        self.decode(wire, result)
        return float((result - values).double().square().sum())

    def prepare(self, device: torch.device) -> None:
        """Has compiled what codes values on a device, so that no step waits for that; on the CPU nothing is."""
        if device.type == "cpu":
            return
        values = torch.zeros(3 * self.unit, dtype=torch.float32, device=device)
        wire = torch.zeros(self.nbytes(values.numel()), dtype=torch.uint8, device=device)
        self.encode(values, wire, Draw(), torch.zeros_like(values) if self.residual else None)
        self.decode(wire, values)

    def theory(self, n: int) -> float:
        """Returns the bytes that the paper gives for n values."""
        return self.nbytes(n)
