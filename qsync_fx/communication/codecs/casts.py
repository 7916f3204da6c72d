"""Casts to torch's plain float formats, like torch's communication hooks, and FP32 without coding.

Invariant: a cast decodes to torch's conversion, and rounds a mean to the format like torch's hooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.codecs.codec import Codec, Draw, Feedback
from qsync_fx.formats import FORMATS, Precision


@dataclass(frozen=True)
class CastCodec(Codec):
    """Cast to a plain float format of torch, or FP32 unchanged."""

    format: Precision

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.format.name

    @property
    def unit(self) -> int:
        return 2

    def nbytes(self, n: int) -> int:
        return -(-n * self.format.dtype.itemsize // 4) * 4

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        self._sent(wire, values.numel()).copy_(values)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        buffers.put(self._sent(wire, values.numel()), values, add)

    def settle(self, values: Tensor) -> Tensor:
        return values.copy_(values.to(self.format.dtype))

    def _sent(self, wire: Tensor, n: int) -> Tensor:
        buffers.long_enough(wire, self.nbytes(n))
        return wire[: n * self.format.dtype.itemsize].view(self.format.dtype)


PLAIN: Final = CastCodec(FORMATS["fp32"])
"""FP32 without coding: for tensors too small to benefit from a codec."""

CODECS: Final = (
    PLAIN,
    *(CastCodec(row) for row in FORMATS.values() if row.plain and row.bits == 16),
)
