"""AQGB's truncation codec (X. Liu et al., 2022): the highest 12 to 32 bits of each FP32 value.

Partitions contain their level, and have equal bytes at every level, except for the last. Invariant:
truncation moves a value towards zero by less than 2**-(bits - 9) of it; NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from qsync_fx import _C
from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.codecs.codec import Codec, Draw, Feedback

LEVELS = (12, 16, 20, 24, 28, 32)
STEP = 420  # bytes that contain a whole number of values at every level


@dataclass(frozen=True)
class Truncated(Codec):
    """One level of AQGB; with `feedback`, the truncated part is error feedback."""

    bits: int
    partition: int = 32 * STEP
    feedback: bool = False
    gathered: ClassVar[bool] = True
    on_host: ClassVar[bool] = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"aqgb{self.bits}"

    @property
    def residual(self) -> bool:  # type: ignore[override]
        return self.feedback

    @property
    def unit(self) -> int:
        return self.partition * 8 // self.bits

    def nbytes(self, n: int) -> int:
        return _C.truncate_bytes(n, self.bits, self.partition)

    def theory(self, n: int) -> float:
        return n * self.bits / 8

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        n = values.numel()
        if not values.is_cpu:
            coded, left = wire.cpu(), None if residual is None else residual.cpu()
            self.encode(values.cpu(), coded, draw, left)
            wire.copy_(coded)
            if residual is not None and left is not None:
                residual.copy_(left)
            return
        source, error = buffers.floats(values), buffers.feedback(residual, values)
        target = buffers.bytes_of(wire, self.nbytes(n))
        settings = self.bits, self.partition, torch.get_num_threads()
        _C.truncate_encode(source, error, target, n, *settings)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        """Decode values of any levels; raise `ValueError` if they do not match their number."""
        n = values.numel()
        if not values.is_cpu:
            decoded = torch.empty(n)
            self.decode(wire.cpu(), decoded)
            buffers.put(decoded.to(values.device), values, add)
            return
        source, target = buffers.bytes_of(wire, 0), buffers.floats(values)
        _C.truncate_decode(source, wire.numel(), target, n, add, torch.get_num_threads())


@dataclass(frozen=True)
class Adaptive(Truncated):
    """AQGB: each rank chooses levels during a step; without a controller it codes 32 bits."""

    bits: int = LEVELS[-1]
    segment: int = 2**22  # FP32 bytes for which levels are chosen together
    grace: float = 0.0  # seconds that a step may wait for gradients after its backward pass
    elapsed: bool = False  # whether the link rate includes idle time, as in the paper

    @property
    def name(self) -> str:  # type: ignore[override]
        return "aqgb"


CODECS: Final = (*(Truncated(bits) for bits in LEVELS), Adaptive())
