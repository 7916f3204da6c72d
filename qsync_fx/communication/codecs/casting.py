"""Gradients in a narrower format of torch, as in the hooks of torch, and in FP32 as they are.

Invariant: what is decoded is what torch's conversion gives. A mean is a value of the format, too, as it is behind torch's hooks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.communication.codecs import memory
from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.precision import Precision


@dataclass(frozen=True)
class Cast(Codec):
    """Gradients in a plain float format."""

    format: Precision

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.format.name

    @property
    def unit(self) -> int:
        return 2

    def nbytes(self, n: int) -> int:
        return -(-n * self._dtype.itemsize // 4) * 4

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Tensor | None = None) -> None:
        self._sent(wire, values.numel()).copy_(values)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        sent = self._sent(wire, values.numel())
        if add:
            values += sent
        else:
            values.copy_(sent)

    def settle(self, values: Tensor) -> Tensor:
        return values if self._dtype == values.dtype else values.copy_(values.to(self._dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return self.format.dtype

    def _sent(self, wire: Tensor, n: int) -> Tensor:
        memory.long_enough(wire, self.nbytes(n))
        return wire[: n * self._dtype.itemsize].view(self._dtype)
