"""Call sites: what is the same for all calls of a product with operands that lie alike, so that it is found out once.

A training step calls hundreds of kernels, and each microsecond in Python is one in which a small GPU may have nothing to do. So which
kernel computes, whether it takes the operands, how much memory it needs and all its arguments but pointers are kept here.

Invariant: a site is for the key that it is kept under, which holds all that it was made from: types, shapes, strides, where memory starts
within 16 bytes, and how often a kernel was refused. Calls of several threads may share one: each fills in a copy. `Sites` keeps them,
those of quantizers too (`quantizer_sites`).

Call sites of quantizers: what is the same for all calls with tensors that lie alike, found out once, as `sites` has it for products.

Invariant: as of `sites`.
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
"""Sites that are kept: shapes may be without end."""

Key = tuple[object, ...]
Copy = Callable[[Tensor], Tensor]
Kept = TypeVar("Kept")


class Sites(dict[Key, Kept]):
    """What calls look themselves up in. It is empty again when it is full, and when what is known of devices is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        WHEN_FORGOTTEN.append(self.clear)

    def keep(self, key: Key, site: Kept) -> Kept:
        """Keeps a site and returns it."""
        if len(self) >= MOST:
            self.clear()
        self[key] = site
        return site


@dataclass(frozen=True)
class ByTorch:
    """A product that torch computes. `integers`: see `Decision`."""

    integers: bool = True


class _KernelSite:
    """A kernel for operands that lie alike, and what a call does with them; `GemmSite` and `ConvSite` say how they lie and what it is told.

    Attributes:
        library, problem: the kernel, and what it computes.
    """

    _whole: tuple[int, ...]  # the shape of what the kernel writes
    _steps: tuple[int, ...]  # its strides
    _rows: int  # values of a scale of the first operand that is no single number; of columns, those of the second one's and of the bias
    _columns: int
    _first: (
        Copy | None
    )  # makes of the first operand what the kernel reads; None where it does as it lies
    _second: Copy | None
    _part: Copy | None  # what is returned of what the kernel writes; None for all, as it lies
    _fresh: Callable[
        [], GemmArguments | ConvArguments
    ]  # gives a copy of all arguments but pointers

    def __init__(self, library: Library, problem: Problem, out: str, a: Tensor) -> None:
        self.library, self.problem, self._device, self._type = (
            library,
            problem,
            a.device,
            type_of(out),
        )
        self._size: int | None = None

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Computes the product; raises `KernelError` where the kernel does not take the operands, or cannot be started."""
        if launch_utils.elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self._queued(a, b, a_scale, b_scale, bias)
        return self._queued(a, b, a_scale, b_scale, bias)

    def _queued(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        if self._first is not None:
            a = self._first(a)
        if self._second is not None:
            b = self._second(b)
        d = torch.empty_strided(self._whole, self._steps, dtype=self._type, device=self._device)
        x = self._fresh()
        x.a, x.b, x.d = a.data_ptr(), b.data_ptr(), d.data_ptr()
        # Copies keep their names, so that they live until the kernel is queued.
        if a_scale is not None:
            if a_scale.dim():
                a_scale = _vector(a_scale, self._rows)
            x.a_scale = a_scale.data_ptr()
        if b_scale is not None:
            if b_scale.dim():
                b_scale = _vector(b_scale, self._columns)
            x.b_scale = b_scale.data_ptr()
        if bias is not None:
            bias = _vector(bias, self._columns)
            x.bias = bias.data_ptr()
        if self._size is None:
            self._size = launch_utils.asked(self.library, x)
        launch_utils.queue(self.library, x, self._size, self._device)
        return d if self._part is None else self._part(d)


class GemmSite(_KernelSite):
    """A kernel for matrices that lie alike."""

    def __init__(
        self,
        library: Library,
        config: KernelConfig,
        problem: GemmProblem,
        used: GemmProblem,
        a: Tensor,
        b: Tensor,
    ) -> None:
        """
        Args:
            problem: what is computed.
            taken: how the kernel takes it.
            a, b: operands as every call has them, but for values.
        """
        super().__init__(library, problem, used.out, a)
        m, n, k = used.m, used.n, used.k
        a_copied = tuple(a.shape) != (m, k) or not aligned(a, used.a_major, config.alignment)
        b_copied = tuple(b.shape) != (k, n) or not aligned(b, used.b_major, config.alignment)
        self._first = (
            (lambda t: layout_convert.laid_out(t, m, k, used.a_major)) if a_copied else None
        )
        self._second = (
            (lambda t: layout_convert.laid_out(t, k, n, used.b_major)) if b_copied else None
        )
        self._whole, self._steps, self._rows, self._columns = (m, n), (n, 1), m, n
        rows, columns = int(a.shape[0]), int(b.shape[1])
        self._part = (
            None if (m, n) == (rows, columns) else lambda d: d[:rows, :columns].contiguous()
        )
        arguments = GemmArguments(
            lda=_leading(a, (m, k), used.a_major, a_copied), ldb=_leading(b, (k, n), used.b_major, b_copied), ldd=n,
            m=m, n=n, k=k, a_scale_per_row=used.a_scale == "channel", b_scale_per_column=used.b_scale == "channel",
            split=1, **launch_utils.place(a.device),
        )  # fmt: skip
        self._fresh = partial(GemmArguments.from_buffer_copy, arguments)


class ConvSite(_KernelSite):
    """A kernel for images and filters that lie alike; as `GemmSite`."""

    def __init__(
        self,
        library: Library,
        config: KernelConfig,
        problem: ConvProblem,
        used: ConvProblem,
        a: Tensor,
        b: Tensor,
    ) -> None:
        super().__init__(library, problem, used.out, a)
        p, t = problem, used
        x, weight, y = (t.n, t.c), (t.k, t.c), (t.n, t.k)
        first, second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
        shape, full = {
            "fprop": ((p.n, p.p, p.q, p.k), (t.n, t.p, t.q, t.k)),
            "dgrad": ((p.n, p.h, p.w, p.c), (t.n, t.h, t.w, t.c)),
            "wgrad": ((p.k, p.r, p.s, p.c), (t.k, t.r, t.s, t.c)),
        }[p.operation]
        self._first = (
            None
            if _lies_last(a, *first)
            else lambda image: layout_convert.channels_last(image, *first)
        )
        self._second = (
            None
            if _lies_last(b, *second)
            else lambda image: layout_convert.channels_last(image, *second)
        )
        # The first operand has one scale, whatever its rows.
        self._rows, self._columns = 1, t.k
        n, h, w, c = full
        self._whole, self._steps = (n, c, h, w), (h * w * c, 1, w * c, c)
        self._part = None if full == shape else lambda d: _cut(d, shape[0], shape[3])
        (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w) = (
            t.padding,
            t.stride,
            t.dilation,
        )
        arguments = ConvArguments(
            n=t.n, h=t.h, w=t.w, c=t.c, k=t.k, r=t.r, s=t.s, p=t.p, q=t.q,
            pad_h=pad_h, pad_w=pad_w, stride_h=stride_h, stride_w=stride_w, dilation_h=dilation_h, dilation_w=dilation_w,
            b_scale_per_channel=t.b_scale == "channel", split=1, **launch_utils.place(a.device),
        )  # fmt: skip
        self._fresh = partial(ConvArguments.from_buffer_copy, arguments)


Site = GemmSite | ConvSite | ByTorch
cached_call: Final[Sites[Site]] = Sites()
"""Those of products."""


def _leading(t: Tensor, shape: tuple[int, int], method: Major, copied: bool) -> int | None:
    return (shape[1] if method == "row" else shape[0]) if copied else leading(t, method)


def _vector(t: Tensor, size: int) -> Tensor:
    """Returns a vector of FP32 values as `padding.filled_vector` does, and as it is where that is one."""
    if t.dtype is torch.float32 and t.numel() == size and t.is_contiguous():
        return t
    return padding.filled_vector(t, size)


def _cut(d: Tensor, first: int, second: int) -> Tensor:
    """Returns a copy of the first images and channels, channels last."""
    return d.permute(0, 2, 3, 1)[:first, :, :, :second].contiguous().permute(0, 3, 1, 2)


def _lies_last(t: Tensor, first: int, second: int) -> bool:
    """Whether a tensor has these sizes, and its channels last, without gaps."""
    n, c, h, w = t.shape
    packed = (h * w * c, 1, w * c, c)
    lies = all(
        size == 1 or have == want
        for size, have, want in zip(t.shape, t.stride(), packed, strict=True)
    )
    return (n, c) == (first, second) and lies and t.data_ptr() % padding.VECTOR == 0


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
    _read: (
        torch.dtype | None
    )  # what is copied to first, as the result lies; None where the kernel reads it as it lies

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
            x_type=X_TYPES[str(format_name(self._read or x.dtype))], format=QUANTIZER_FORMATS[encoding(row).name],
            rounding=ROUNDINGS[rounding],
            group=groups.group, **launch_utils.place(x.device),
        )  # fmt: skip
        self._fresh = partial(QuantizeArguments.from_buffer_copy, arguments)

    def __call__(
        self, x: Tensor, seed: Tensor, stream: int, transposed: bool
    ) -> tuple[Tensor, ...]:
        """Returns `(q, scale)`, or `(q, transpose, scale)`; raises `KernelError` where the kernel refuses or cannot be started."""
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
        """Fills `q`, and `turned` with its transpose if given, and returns the scales; raises as a call does."""
        if launch_utils.elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self._filled(x, q, transposed, seed, stream)
        return self._filled(x, q, transposed, seed, stream)

    def _filled(
        self, x: Tensor, q: Tensor, transposed: Tensor | None, seed: Tensor, stream: int
    ) -> Tensor:
        # Copies keep their names, so that they live until the kernel is queued.
        if self._read is not None:
            shape, strides, _ = self._q
            x = torch.empty_strided(shape, strides, dtype=self._read, device=self._device).copy_(x)
        scale = torch.empty(self._scale, dtype=torch.float32, device=self._device)
        seed = seed.to(self._device)
        inputs = self._fresh()
        inputs.x, inputs.q, inputs.scale, inputs.seed = (
            x.data_ptr(),
            q.data_ptr(),
            scale.data_ptr(),
            seed.data_ptr(),
        )
        inputs.stream = stream & 0xFFFFFFFF
        if transposed is not None:
            inputs.qt = transposed.data_ptr()
        if self._size is None:
            self._size = launch_utils.asked(self.library, inputs)
        launch_utils.queue(self.library, inputs, self._size, self._device)
        return scale


def _stride(x: Tensor, q: Tensor, groups: Groups) -> int | None:
    """Returns the stride between rows of `x` where its values are in the order of `q`'s memory, and None where they have to be copied."""
    if x.dtype not in TYPES:
        return None
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), q.stride(), strict=True)):
        return groups.columns
    by_rows = x.dim() == 2 and q.stride(1) == x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return int(x.stride(0)) if by_rows and (groups.rows, groups.columns) == tuple(x.shape) else None


cached_quantizer_call: Final[Sites[QuantizerSite]] = Sites()
"""Those of quantizers."""
