"""AQGB's truncation codec (X. Liu et al., 2022): the highest 12 to 32 bits of each FP32 value.

Partitions have equal bytes at every level, except for the last of a tensor, and contain their
level, so that a reader need not know it. Invariant: truncation moves a value towards zero by less
than 2**-(bits - 9) of it; NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from qsync_fx.communication.codecs import buffers, torch_kernels
from qsync_fx.communication.codecs.codec import Codec, Draw

LEVELS = (12, 16, 20, 24, 28, 32)
STEP = 420
"""Bytes that contain a whole number of values at every level."""


@dataclass(frozen=True)
class Truncated(Codec):
    """One level of AQGB; with `feedback`, the truncated part is error feedback."""

    bits: int
    partition: int = 32 * STEP
    feedback: bool = False
    gathered: ClassVar[bool] = True

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
        result: int = buffers.kernels().truncate_bytes(n, self.bits, self.partition)
        return result

    def theory(self, n: int) -> float:
        return n * self.bits / 8

    def encode(
        self, values: Tensor, wire: Tensor, draw: Draw, residual: Tensor | None = None
    ) -> None:
        n = values.numel()
        if not buffers.native(values):
            full = values if residual is None else values + residual
            coded = torch_kernels.truncate_encode(full, self.bits, self.partition)
            wire[: coded.numel()].copy_(coded)
            if residual is not None:
                error = full - torch_kernels.truncated(full, self.bits)
                residual.copy_(torch.where(full.isfinite(), error, residual))
            return
        source, feedback_of = buffers.floats(values), buffers.same_size(values, residual)
        target = buffers.bytes_of(wire, self.nbytes(n))
        settings = self.bits, self.partition, torch.get_num_threads()
        buffers.kernels().truncate_encode(source, feedback_of, target, n, *settings)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        """Decode values of any levels; on a device other than the CPU, of this level only.

        Raises:
            ValueError: on the CPU, levels and counts in `wire` do not match the number of values.
        """
        n = values.numel()
        if not buffers.native(values):
            coded = wire[: self.nbytes(n)]
            decoded = torch_kernels.truncate_decode(coded, n, self.bits, self.partition)
            buffers.put(decoded, values, add)
            return
        source, target = buffers.bytes_of(wire, 0), buffers.floats(values)
        threads = torch.get_num_threads()
        buffers.kernels().truncate_decode(source, wire.numel(), target, n, add, threads)


@dataclass(frozen=True)
class Adaptive(Truncated):
    """AQGB: each rank chooses levels during a step (see `aqgb.controller`).

    Without a controller it codes 32 bits.

    Attributes:
        segment: FP32 bytes for which levels are chosen together.
        grace: seconds that a step may wait for gradients after its backward pass.
        elapsed: whether the link rate includes idle time, as in the paper. A link with little
            traffic then appears slow.
    """

    bits: int = LEVELS[-1]
    segment: int = 2**22
    grace: float = 0.0
    elapsed: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return "aqgb"


CODECS: Final = (*(Truncated(bits) for bits in LEVELS), Adaptive())
