"""Call sites: what is the same for all calls of a product with operands that lie alike, so that it is found out once.

A training step calls hundreds of kernels, and each microsecond in Python is one in which a small GPU may have nothing to do. So which
kernel computes, whether it takes the operands, how much memory it needs and all its arguments but pointers are kept here.

Invariant: a site is for the key that it is kept under, which holds all that it was made from: types, shapes, strides, where memory starts
within 16 bytes, and how often a kernel was refused. Calls of several threads may share one: each fills in a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.libraries.abi import ConvArguments, GemmArguments
from qsync_fx.backend.cuda.libraries.library import Library
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Major, padding
from qsync_fx.backend.cuda.problem.operands import aligned, leading, type_of
from qsync_fx.backend.cuda.run import calls, converting
from qsync_fx.backend.cuda.run.device import WHEN_FORGOTTEN

MOST: Final = 4096
"""Sites that are kept: shapes may be without end."""


@dataclass(frozen=True)
class ByTorch:
    """A product that torch computes. `integers`: see `Decision`."""

    integers: bool = True


class GemmSite:
    """A kernel for matrices that lie alike; called with them. Raises `KernelError` where it does not take them, or cannot be started."""

    def __init__(
        self, library: Library, config: KernelConfig, problem: GemmProblem, taken: GemmProblem, a: Tensor, b: Tensor
    ) -> None:
        """
        Args:
            problem: what is computed.
            taken: how the kernel takes it.
            a, b: operands as every call has them, but for values.
        """
        self.library, self.problem, self._taken, self._device = library, problem, taken, a.device
        m, n, k = taken.m, taken.n, taken.k
        self._a_copied = tuple(a.shape) != (m, k) or not aligned(a, taken.a_major, config.alignment)
        self._b_copied = tuple(b.shape) != (k, n) or not aligned(b, taken.b_major, config.alignment)
        self._shape, self._type = (int(a.shape[0]), int(b.shape[1])), type_of(taken.out)
        self._size: int | None = None
        self._arguments = GemmArguments(
            lda=_leading(a, (m, k), taken.a_major, self._a_copied), ldb=_leading(b, (k, n), taken.b_major, self._b_copied), ldd=n,
            m=m, n=n, k=k, a_scale_per_row=taken.a_scale == "channel", b_scale_per_column=taken.b_scale == "channel",
            split=1, **calls.place(a.device),
        )  # fmt: skip

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        taken, library = self._taken, self.library
        m, n = taken.m, taken.n
        with calls.guarded(self._device):
            if self._a_copied:
                a = converting.laid_out(a, m, taken.k, taken.a_major)
            if self._b_copied:
                b = converting.laid_out(b, taken.k, n, taken.b_major)
            d = a.new_empty((m, n), dtype=self._type)
            # Named, so that a copy lives until the kernel is queued.
            rows, columns, added = _vector(a_scale, m), _vector(b_scale, n), _vector(bias, n)
            x = GemmArguments.from_buffer_copy(self._arguments)
            x.a, x.b, x.d = a.data_ptr(), b.data_ptr(), d.data_ptr()
            if rows is not None:
                x.a_scale = rows.data_ptr()
            if columns is not None:
                x.b_scale = columns.data_ptr()
            if added is not None:
                x.bias = added.data_ptr()
            if self._size is None:
                self._size = calls.asked(library, x)
            calls.queue(library, x, self._size, self._device)
        return d if (m, n) == self._shape else d[: self._shape[0], : self._shape[1]].contiguous()


class ConvSite:
    """A kernel for images and filters that lie alike; as `GemmSite`."""

    def __init__(
        self, library: Library, config: KernelConfig, problem: ConvProblem, taken: ConvProblem, a: Tensor, b: Tensor
    ) -> None:
        p, t = problem, taken
        self.library, self.problem, self._device, self._k, self._type = library, problem, a.device, t.k, type_of(t.out)
        x, weight, y = (t.n, t.c), (t.k, t.c), (t.n, t.k)
        self._first, self._second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
        self._shape, self._whole = {
            "fprop": ((p.n, p.p, p.q, p.k), (t.n, t.p, t.q, t.k)),
            "dgrad": ((p.n, p.h, p.w, p.c), (t.n, t.h, t.w, t.c)),
            "wgrad": ((p.k, p.r, p.s, p.c), (t.k, t.r, t.s, t.c)),
        }[p.operation]
        self._a_copied, self._b_copied = not _lies_last(a, *self._first), not _lies_last(b, *self._second)
        self._size: int | None = None
        (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w) = t.padding, t.stride, t.dilation
        self._arguments = ConvArguments(
            n=t.n, h=t.h, w=t.w, c=t.c, k=t.k, r=t.r, s=t.s, p=t.p, q=t.q,
            pad_h=pad_h, pad_w=pad_w, stride_h=stride_h, stride_w=stride_w, dilation_h=dilation_h, dilation_w=dilation_w,
            b_scale_per_channel=t.b_scale == "channel", split=1, **calls.place(a.device),
        )  # fmt: skip

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        library, shape = self.library, self._shape
        with calls.guarded(self._device):
            if self._a_copied:
                a = converting.channels_last(a, *self._first)
            if self._b_copied:
                b = converting.channels_last(b, *self._second)
            d = a.new_empty(self._whole, dtype=self._type)
            channels, added = _vector(b_scale, self._k), _vector(bias, self._k)
            x = ConvArguments.from_buffer_copy(self._arguments)
            x.a, x.b, x.d = a.data_ptr(), b.data_ptr(), d.data_ptr()
            if a_scale is not None:
                x.a_scale = a_scale.data_ptr()
            if channels is not None:
                x.b_scale = channels.data_ptr()
            if added is not None:
                x.bias = added.data_ptr()
            if self._size is None:
                self._size = calls.asked(library, x)
            calls.queue(library, x, self._size, self._device)
        if self._whole != shape:
            d = d[: shape[0], :, :, : shape[3]].contiguous()
        return d.permute(0, 3, 1, 2)


Site = GemmSite | ConvSite | ByTorch
known: Final[dict[tuple[object, ...], Site]] = {}
"""What calls look themselves up in."""


def keep(key: tuple[object, ...], site: Site) -> Site:
    """Keeps a site and returns it."""
    if len(known) >= MOST:
        known.clear()
    known[key] = site
    return site


def _leading(t: Tensor, shape: tuple[int, int], way: Major, copied: bool) -> int | None:
    return (shape[1] if way == "row" else shape[0]) if copied else leading(t, way)


def _vector(t: Tensor | None, size: int) -> Tensor | None:
    """Returns a vector of FP32 values as `padding.filled_vector` does, and as it is where that is one."""
    if t is None or t.dim() == 0 or (t.numel() == size and t.is_contiguous() and t.dtype.itemsize == 4):
        return t
    return padding.filled_vector(t, size)


def _lies_last(t: Tensor, first: int, second: int) -> bool:
    """Whether a tensor has these sizes, and its channels last, without gaps."""
    n, c, h, w = t.shape
    packed = (h * w * c, 1, w * c, c)
    lies = all(size == 1 or have == want for size, have, want in zip(t.shape, t.stride(), packed, strict=True))
    return (n, c) == (first, second) and lies and t.data_ptr() % padding.VECTOR == 0


WHEN_FORGOTTEN.append(known.clear)
