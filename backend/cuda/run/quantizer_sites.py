"""Call sites of quantizers: what is the same for all calls with tensors that lie alike, found out once, as `sites` has it for products.

Invariant: as of `sites`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.libraries.abi import QuantizeArguments
from qsync_fx.backend.cuda.libraries.library import Library
from qsync_fx.backend.cuda.problem.operands import format_name
from qsync_fx.backend.cuda.run import calls
from qsync_fx.backend.cuda.run.sites import Sites
from qsync_fx.backend.cuda.source.quantizer_source import FORMATS, ROUNDINGS, X_TYPES
from qsync_fx.backend.numerics import reference
from qsync_fx.precision import Precision, encoding
from qsync_fx.rounding.mode import Rounding

TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels read; all else is converted to FP32 first."""


@dataclass(frozen=True)
class Groups:
    """Memory as a matrix. `group`: 0 one scale for all, 1 one for each row, 2 one for each column."""

    rows: int
    columns: int
    group: int


class QuantizerSite:
    """A kernel that quantizes tensors that lie alike, and what a call does with them."""

    _size: int | None  # bytes of its workspace, once it was asked
    _read: torch.dtype | None  # what is copied to first, as the result lies; None where the kernel reads it as it lies

    def __init__(
        self,
        library: Library,
        x: Tensor,
        q: Tensor,
        row: Precision,
        rounding: Rounding,
        keep: Sequence[int],
        groups: Groups,
    ) -> None:
        """
        Args:
            x, q: what is read and what is written, as every call has them, but for values.
            groups: the memory of `q`.
        """
        self.library, self._device, self._size = library, x.device, None
        self._q = tuple(map(int, q.shape)), tuple(map(int, q.stride())), q.dtype
        self._scale = [int(size) for size in reference.scale_shape(q, keep)]
        self._turned = groups.columns, groups.rows
        lies = _stride(x, q, groups)
        self._read = None if lies is not None else x.dtype if x.dtype in TYPES else torch.float32
        arguments = QuantizeArguments(
            rows=groups.rows, columns=groups.columns, ldx=groups.columns if lies is None else lies,
            x_type=X_TYPES[str(format_name(self._read or x.dtype))], format=FORMATS[encoding(row).name], rounding=ROUNDINGS[rounding],
            group=groups.group, **calls.place(x.device),
        )  # fmt: skip
        self._fresh = partial(QuantizeArguments.from_buffer_copy, arguments)

    def __call__(self, x: Tensor, seed: Tensor, stream: int, turned: bool) -> tuple[Tensor, ...]:
        """Returns `(q, scale)`, or `(q, transpose, scale)`; raises `KernelError` where the kernel refuses or cannot be started."""
        q = self._empty()
        if not turned:
            return q, self.fill(x, q, None, seed, stream)
        transpose = torch.empty(self._turned, dtype=q.dtype, device=self._device)
        return q, transpose, self.fill(x, q, transpose, seed, stream)

    def _empty(self) -> Tensor:
        shape, strides, dtype = self._q
        return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)

    def fill(self, x: Tensor, q: Tensor, turned: Tensor | None, seed: Tensor, stream: int) -> Tensor:
        """Fills `q`, and `turned` with its transpose if given, and returns the scales; raises as a call does."""
        if calls.elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self._filled(x, q, turned, seed, stream)
        return self._filled(x, q, turned, seed, stream)

    def _filled(self, x: Tensor, q: Tensor, turned: Tensor | None, seed: Tensor, stream: int) -> Tensor:
        # Copies keep their names, so that they live until the kernel is queued.
        if self._read is not None:
            shape, strides, _ = self._q
            x = torch.empty_strided(shape, strides, dtype=self._read, device=self._device).copy_(x)
        scale = torch.empty(self._scale, dtype=torch.float32, device=self._device)
        seed = seed.to(self._device)
        given = self._fresh()
        given.x, given.q, given.scale, given.seed = x.data_ptr(), q.data_ptr(), scale.data_ptr(), seed.data_ptr()
        given.stream = stream & 0xFFFFFFFF
        if turned is not None:
            given.qt = turned.data_ptr()
        if self._size is None:
            self._size = calls.asked(self.library, given)
        calls.queue(self.library, given, self._size, self._device)
        return scale


def _stride(x: Tensor, q: Tensor, groups: Groups) -> int | None:
    """Returns the stride between rows of `x` where its values are in the order of `q`'s memory, and None where they have to be copied."""
    if x.dtype not in TYPES:
        return None
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), q.stride(), strict=True)):
        return groups.columns
    by_rows = x.dim() == 2 and q.stride(1) == x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return int(x.stride(0)) if by_rows and (groups.rows, groups.columns) == tuple(x.shape) else None


known: Final[Sites[QuantizerSite]] = Sites()
"""Those of quantizers."""
