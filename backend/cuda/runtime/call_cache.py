"""Cache of prepared kernel calls, per layout of the operands.

A training step calls hundreds of kernels, and Python overhead per call can leave a small GPU idle.
A call site therefore stores the chosen kernel, its acceptance of the operands, its workspace size
and all arguments except pointers.

Invariant: the key of a site determines it: dtypes, shapes, strides, addresses modulo 16 bytes, and
the number of refused kernels. Threads may share a site: each call fills in its own copy of the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import QUANTIZER_FORMATS, ROUNDINGS, X_TYPES
from qsync_fx.backend.cuda.kernel_build.library import (
    ConvArguments,
    GemmArguments,
    Library,
    QuantizeArguments,
)
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import padding
from qsync_fx.backend.cuda.problem.problem import ConvProblem, GemmProblem, Major, Problem
from qsync_fx.backend.cuda.problem.problem_from_tensors import (
    ConvProduct,
    GemmProduct,
    aligned,
    format_name,
    leading,
    type_of,
)
from qsync_fx.backend.cuda.runtime import launch_utils, layout_convert
from qsync_fx.backend.cuda.runtime.device_state import WHEN_FORGOTTEN
from qsync_fx.backend.numerics import reference
from qsync_fx.formats import Precision, encoding
from qsync_fx.rounding import Rounding

MOST: Final = 4096
"""Capacity of a cache, since the number of shapes is unbounded."""

Key = tuple[object, ...]
Copy = Callable[[Tensor], Tensor]
Kept = TypeVar("Kept")


class Sites(dict[Key, Kept]):
    """Cache of call sites by key.

    It is cleared when it is full, and when cached device decisions become invalid.
    """

    def __init__(self) -> None:
        super().__init__()
        WHEN_FORGOTTEN.append(self.clear)

    def keep(self, key: Key, site: Kept) -> Kept:
        """Store a site and return it."""
        if len(self) >= MOST:
            self.clear()
        self[key] = site
        return site


@dataclass(frozen=True)
class ByTorch:
    """Call site of a product that torch computes. `integers`: see `KernelDecision`."""

    integers: bool = True


class _KernelSite:
    """Call site of a kernel for operands of one layout; subclasses set layouts and arguments.

    Attributes:
        library: library of the kernel.
        problem: the problem that it computes.
        _whole, _steps: shape and strides of the tensor that the kernel writes, padding included.
        _rows: length of `a_scale` if it is not a single number.
        _columns: length of `b_scale` if it is not a single number, and of the bias.
        _first, _second: copy of `a`, `b` into the kernel's layout; None if it reads them directly.
        _part: function that removes the padding of the result; None without padding.
        _fresh: function that returns a copy of all arguments except pointers.
    """

    _whole: tuple[int, ...]
    _steps: tuple[int, ...]
    _rows: int
    _columns: int
    _first: Copy | None = None
    _second: Copy | None = None
    _part: Copy | None = None
    _fresh: Callable[[], GemmArguments | ConvArguments]

    def __init__(self, library: Library, problem: Problem, out: str, a: Tensor) -> None:
        self.library, self.problem = library, problem
        self._device, self._type = a.device, type_of(out)
        self._size: int | None = None

    def __call__(self, x: GemmProduct | ConvProduct) -> Tensor:
        """Compute the product; raise `KernelError` if the kernel rejects the operands or fails."""
        if launch_utils.elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self._queued(x)
        return self._queued(x)

    def _queued(self, x: GemmProduct | ConvProduct) -> Tensor:
        # The names keep the copies alive until the kernel is queued.
        a, b, a_scale, b_scale, bias = x[:5]
        if self._first is not None:
            a = self._first(a)
        if self._second is not None:
            b = self._second(b)
        d = torch.empty_strided(self._whole, self._steps, dtype=self._type, device=self._device)
        arguments = self._fresh()
        arguments.a, arguments.b, arguments.d = a.data_ptr(), b.data_ptr(), d.data_ptr()
        if a_scale is not None:
            if a_scale.dim():
                a_scale = _vector(a_scale, self._rows)
            arguments.a_scale = a_scale.data_ptr()
        if b_scale is not None:
            if b_scale.dim():
                b_scale = _vector(b_scale, self._columns)
            arguments.b_scale = b_scale.data_ptr()
        if bias is not None:
            bias = _vector(bias, self._columns)
            arguments.bias = bias.data_ptr()
        if self._size is None:
            self._size = launch_utils.asked(self.library, arguments)
        launch_utils.queue(self.library, arguments, self._size, self._device)
        return d if self._part is None else self._part(d)


class GemmSite(_KernelSite):
    """Call site of a GEMM kernel."""

    def __init__(
        self,
        library: Library,
        config: KernelConfig,
        problem: GemmProblem,
        used: GemmProblem,
        x: GemmProduct,
    ) -> None:
        """Prepare a call.

        Args:
            problem: the requested problem.
            used: the padded or re-laid-out problem that the kernel runs.
            x: example arguments; all calls share their metadata, not their values.
        """
        a, b = x.a, x.b
        super().__init__(library, problem, used.out, a)
        m, n, k = used.m, used.n, used.k
        a_copied = tuple(a.shape) != (m, k) or not aligned(a, used.a_major, config.alignment)
        b_copied = tuple(b.shape) != (k, n) or not aligned(b, used.b_major, config.alignment)
        if a_copied:
            self._first = lambda t: layout_convert.laid_out(t, m, k, used.a_major)
        if b_copied:
            self._second = lambda t: layout_convert.laid_out(t, k, n, used.b_major)
        self._whole, self._steps, self._rows, self._columns = (m, n), (n, 1), m, n
        rows, columns = int(a.shape[0]), int(b.shape[1])
        if (m, n) != (rows, columns):
            self._part = lambda d: d[:rows, :columns].contiguous()
        arguments = GemmArguments(
            lda=_leading(a, (m, k), used.a_major, a_copied),
            ldb=_leading(b, (k, n), used.b_major, b_copied), ldd=n,
            m=m, n=n, k=k, a_scale_per_row=used.a_scale == "channel",
            b_scale_per_column=used.b_scale == "channel",
            split=1, **launch_utils.place(a.device),
        )  # fmt: skip
        self._fresh = partial(GemmArguments.from_buffer_copy, arguments)


class ConvSite(_KernelSite):
    """Call site of a convolution kernel; see `GemmSite`."""

    def __init__(
        self,
        library: Library,
        config: KernelConfig,
        problem: ConvProblem,
        used: ConvProblem,
        x: ConvProduct,
    ) -> None:
        super().__init__(library, problem, used.out, x.a)
        p, t = problem, used
        image, weight, y = (t.n, t.c), (t.k, t.c), (t.n, t.k)
        first, second = {
            "fprop": (image, weight),
            "dgrad": (y, weight),
            "wgrad": (y, image),
        }[p.operation]
        shape, full = {
            "fprop": ((p.n, p.p, p.q, p.k), (t.n, t.p, t.q, t.k)),
            "dgrad": ((p.n, p.h, p.w, p.c), (t.n, t.h, t.w, t.c)),
            "wgrad": ((p.k, p.r, p.s, p.c), (t.k, t.r, t.s, t.c)),
        }[p.operation]
        if not _lies_last(x.a, *first):
            self._first = lambda t: layout_convert.channels_last(t, *first)
        if not _lies_last(x.b, *second):
            self._second = lambda t: layout_convert.channels_last(t, *second)
        # The first operand of a convolution has at most one scale.
        self._rows, self._columns = 1, t.k
        n, h, w, c = full
        self._whole, self._steps = (n, c, h, w), (h * w * c, 1, w * c, c)
        if full != shape:
            self._part = lambda d: _cut(d, shape[0], shape[3])
        (pad_h, pad_w), (stride_h, stride_w) = t.padding, t.stride
        dilation_h, dilation_w = t.dilation
        arguments = ConvArguments(
            n=t.n, h=t.h, w=t.w, c=t.c, k=t.k, r=t.r, s=t.s, p=t.p, q=t.q,
            pad_h=pad_h, pad_w=pad_w, stride_h=stride_h, stride_w=stride_w, dilation_h=dilation_h,
            dilation_w=dilation_w,
            b_scale_per_channel=t.b_scale == "channel", split=1, **launch_utils.place(x.a.device),
        )  # fmt: skip
        self._fresh = partial(ConvArguments.from_buffer_copy, arguments)


Site = GemmSite | ConvSite | ByTorch
cached_call: Final[Sites[Site]] = Sites()
"""Call sites of GEMMs and convolutions."""


def _leading(t: Tensor, shape: tuple[int, int], method: Major, copied: bool) -> int | None:
    return (shape[1] if method == "row" else shape[0]) if copied else leading(t, method)


def _vector(t: Tensor, size: int) -> Tensor:
    """Return a vector padded as `padding.filled_vector` does; `t` itself if it fits already."""
    if t.dtype is torch.float32 and t.numel() == size and t.is_contiguous():
        return t
    return padding.filled_vector(t, size)


def _cut(d: Tensor, first: int, second: int) -> Tensor:
    """Return a channels-last copy of the first `first` images and `second` channels."""
    return d.permute(0, 2, 3, 1)[:first, :, :, :second].contiguous().permute(0, 3, 1, 2)


def _lies_last(t: Tensor, first: int, second: int) -> bool:
    """Return whether a tensor has these sizes and is channels-last, dense and 16-byte aligned."""
    n, c, h, w = t.shape
    packed = (h * w * c, 1, w * c, c)
    lies = all(
        size == 1 or have == want
        for size, have, want in zip(t.shape, t.stride(), packed, strict=True)
    )
    return (n, c) == (first, second) and lies and t.data_ptr() % padding.VECTOR == 0


TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Input dtypes of quantizer kernels; other dtypes are cast to FP32 first."""


@dataclass(frozen=True)
class Groups:
    """Memory as a matrix. `group`: 0 a single scale, 1 a scale per row, 2 a scale per column."""

    rows: int
    columns: int
    group: int


class QuantizerSite:
    """Call site of a quantizer kernel for tensors of one layout.

    Attributes:
        _size: workspace bytes; None before the first call.
        _read: dtype of the copy of the input in the result's layout; None if the kernel reads the
            input directly.
    """

    _size: int | None
    _read: torch.dtype | None

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
        """Prepare a call.

        Args:
            x, q: example input and output; all calls share their metadata, not their values.
            keep: dimensions that have a scale per index.
            groups: scale groups in the memory of `q`.
        """
        self.library, self._device, self._size = library, x.device, None
        self._q = tuple(map(int, q.shape)), tuple(map(int, q.stride())), q.dtype
        self._scale = [int(size) for size in reference.scale_shape(q, keep)]
        self._turned = groups.columns, groups.rows
        lies = _stride(x, q, groups)
        self._read = None if lies is not None else x.dtype if x.dtype in TYPES else torch.float32
        arguments = QuantizeArguments(
            rows=groups.rows, columns=groups.columns, ldx=groups.columns if lies is None else lies,
            x_type=X_TYPES[str(format_name(self._read or x.dtype))],
            format=QUANTIZER_FORMATS[encoding(row).name],
            rounding=ROUNDINGS[rounding],
            group=groups.group, **launch_utils.place(x.device),
        )  # fmt: skip
        self._fresh = partial(QuantizeArguments.from_buffer_copy, arguments)

    def __call__(
        self, x: Tensor, seed: Tensor, stream: int, transposed: bool
    ) -> tuple[Tensor, ...]:
        """Return `(q, scale)`, or `(q, transpose, scale)`.

        Raises:
            KernelError: the kernel rejects the arguments or cannot be launched.
        """
        q = self._empty()
        if not transposed:
            return q, self.fill(x, q, None, seed, stream)
        transpose = torch.empty(self._turned, dtype=q.dtype, device=self._device)
        return q, transpose, self.fill(x, q, transpose, seed, stream)

    def _empty(self) -> Tensor:
        shape, strides, dtype = self._q
        return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)

    def fill(
        self, x: Tensor, q: Tensor, transposed: Tensor | None, seed: Tensor, stream: int
    ) -> Tensor:
        """Fill `q`, and its transpose if given, and return the scales (FP32).

        Raises:
            KernelError: the kernel rejects the arguments or cannot be launched.
        """
        if launch_utils.elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self._filled(x, q, transposed, seed, stream)
        return self._filled(x, q, transposed, seed, stream)

    def _filled(
        self, x: Tensor, q: Tensor, transposed: Tensor | None, seed: Tensor, stream: int
    ) -> Tensor:
        # The names keep the copies alive until the kernel is queued.
        if self._read is not None:
            shape, strides, _ = self._q
            x = torch.empty_strided(shape, strides, dtype=self._read, device=self._device).copy_(x)
        scale = torch.empty(self._scale, dtype=torch.float32, device=self._device)
        seed = seed.to(self._device)
        inputs = self._fresh()
        inputs.x, inputs.q = x.data_ptr(), q.data_ptr()
        inputs.scale, inputs.seed = scale.data_ptr(), seed.data_ptr()
        inputs.stream = stream & 0xFFFFFFFF
        if transposed is not None:
            inputs.qt = transposed.data_ptr()
        if self._size is None:
            self._size = launch_utils.asked(self.library, inputs)
        launch_utils.queue(self.library, inputs, self._size, self._device)
        return scale


def _stride(x: Tensor, q: Tensor, groups: Groups) -> int | None:
    """Return the row stride of `x` in the memory order of `q`; None if it differs."""
    if x.dtype not in TYPES:
        return None
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), q.stride(), strict=True)):
        return groups.columns
    by_rows = x.dim() == 2 and q.stride(1) == x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return int(x.stride(0)) if by_rows and (groups.rows, groups.columns) == tuple(x.shape) else None


cached_quantizer_call: Final[Sites[QuantizerSite]] = Sites()
"""Call sites of quantizers."""
