"""1bitSGD (F. Seide et al., 2014): signs, two means for each unit, and error feedback.

In a unit, values >= 0 become their mean, and values < 0 theirs. A unit is a column of the gradient
as in CNTK, or consecutive values (1bitSGD*; study of low-precision communication, sections 2.2 and
3.2). Invariant: decoded values plus error feedback are the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from qsync_fx import _C
from qsync_fx.communication.codecs import buffers, torch_kernels
from qsync_fx.communication.codecs.codec import Codec, Draw, Feedback
from qsync_fx.errors import QSyncError


@dataclass(frozen=True)
class Reshaped(Codec):
    """1bitSGD*: units of consecutive values."""

    size: int
    name: str = "1bit*"
    residual: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.size

    def nbytes(self, n: int) -> int:
        return _C.onebit_bytes(n, self.unit)

    def theory(self, n: int) -> float:
        return n * (1 + 64 / self.unit) / 8

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        n = values.numel()
        if not buffers.native(values):
            feedback = torch.zeros_like(values) if residual is None else residual
            coded, left = torch_kernels.onebit_encode(values, feedback, self.unit)
            wire[: coded.numel()].copy_(coded)
            feedback.copy_(left)
            return
        source, error = buffers.floats(values), buffers.feedback(residual, values)
        target = buffers.bytes_of(wire, self.nbytes(n))
        _C.onebit_encode(source, error, target, n, self.size, torch.get_num_threads())

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        n = values.numel()
        if not buffers.native(values):
            decoded = torch_kernels.onebit_decode(wire[: self.nbytes(n)], n, self.unit)
            buffers.put(decoded, values, add)
            return
        source, target = buffers.bytes_of(wire, self.nbytes(n)), buffers.floats(values)
        _C.onebit_decode(source, target, n, self.size, add, torch.get_num_threads(), last=last)


@dataclass(frozen=True)
class Columns(Reshaped):
    """1bitSGD: units are columns; `fitted` returns the codec for the shape of a parameter.

    As in CNTK, a column is the first dimension of a matrix [out, in], the width of a convolution
    kernel, or all of a vector.
    """

    size: int = field(default=0, repr=False)
    name: str = "1bit"

    def fitted(self, shape: Sequence[int]) -> Codec:
        if len(shape) == 2:
            return _Column(max(shape[0], 1), self.name)
        return _Column(max([1, *shape[-1:]]), self.name)

    @property
    def unit(self) -> int:
        text = "1bitSGD encodes columns and needs the shape of a parameter"
        raise QSyncError(text, do="call fitted(shape) first")


@dataclass(frozen=True)
class _Column(Reshaped):
    def theory(self, n: int) -> float:
        return n / self.size * (8 + 4 * -(-self.size // 32))

    def columns(self, gradient: Tensor) -> Tensor | None:
        if gradient.dim() == 2:
            return gradient.t()
        return None if gradient.is_contiguous() else gradient


CODECS: Final = (Columns(), Reshaped(64))
