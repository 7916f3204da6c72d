"""Dispatch of GEMMs and convolutions on tensors: to a kernel, or to torch as the fallback.

This is the "front-end security wrapper" of LP-PyTorch (section VI): a kernel trusts its arguments.
The decision, the operand check and all arguments except pointers are cached per operand layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import unit_of
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import ConvArguments, GemmArguments, Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem, reference_result
from qsync_fx.backend.cuda.problem.padding import VECTOR, filled_vector
from qsync_fx.backend.cuda.problem.problem import (
    ConvProduct,
    GemmProduct,
    aligned,
    conv_problem,
    gemm_problem,
    leading,
    too_large,
    type_of,
)
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.cuda.runtime.device_state import decision, loaded_decision
from qsync_fx.backend.cuda.runtime.launch_utils import CallCache, Key
from qsync_fx.backend.cuda.runtime.layout_convert import channels_last, laid_out
from qsync_fx.backend.cuda.tuning import shown
from qsync_fx.errors import KernelError

Product = GemmProduct | ConvProduct
Copy = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ByTorch:
    """Call site of a product that torch computes. `integers`: see `KernelDecision`."""

    integers: bool = True


@dataclass
class CallSite:
    """Call site of a kernel for operands of one layout.

    Attributes:
        shape, strides, dtype, device: of the tensor that the kernel writes, padding included.
        rows: length of `a_scale` if it is not a single number.
        columns: length of `b_scale` if it is not a single number, and of the bias.
        arguments: all arguments except pointers.
        first, second: copy of `a`, `b` into the kernel's layout; None if it reads them directly.
        part: function that removes the padding of the result; None without padding.
        workspace: bytes; None before the first call.
    """

    library: Library
    problem: Problem
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rows: int
    columns: int
    arguments: GemmArguments | ConvArguments
    first: Copy | None = None
    second: Copy | None = None
    part: Copy | None = None
    workspace: int | None = None

    def __call__(self, x: Product) -> Tensor:
        """Compute the product; raise `KernelError` if the kernel rejects the operands or fails."""
        with launch_utils.guarded(self.device):
            return self._queued(x)

    def _queued(self, x: Product) -> Tensor:
        # The names keep the copies alive until the kernel is queued.
        a, b, a_scale, b_scale, bias = x[:5]
        if self.first is not None:
            a = self.first(a)
        if self.second is not None:
            b = self.second(b)
        d = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        arguments = type(self.arguments).from_buffer_copy(self.arguments)
        arguments.a, arguments.b, arguments.d = a.data_ptr(), b.data_ptr(), d.data_ptr()
        if a_scale is not None:
            a_scale = _vector(a_scale, self.rows)
            arguments.a_scale = a_scale.data_ptr()
        if b_scale is not None:
            b_scale = _vector(b_scale, self.columns)
            arguments.b_scale = b_scale.data_ptr()
        if bias is not None:
            bias = _vector(bias, self.columns)
            arguments.bias = bias.data_ptr()
        if self.workspace is None:
            self.workspace = launch_utils.workspace(self.library, arguments)
        launch_utils.queue(self.library, arguments, self.workspace, self.device)
        if self.part is not None:
            return self.part(d)
        return d


def _vector(t: Tensor, size: int) -> Tensor:
    """Return a vector padded as `padding.filled_vector` does; `t` itself if it fits already."""
    if not t.dim() or (t.dtype is torch.float32 and t.numel() == size and t.is_contiguous()):
        return t
    return filled_vector(t, size)


cached_call: Final[CallCache[CallSite | ByTorch]] = CallCache()


def gemm(x: GemmProduct, check: Callable[[GemmProduct], object] | None = None) -> Tensor:
    """Compute `qsync::gemm` on a CUDA device; a cache miss calls `check`, which may raise."""
    result = _by_kernel((*_key(x), x.out_dtype, x.tf32), x, check)
    if isinstance(result, Tensor):
        return result
    if not x.a.shape[0] or not x.b.shape[1]:
        return x.a.new_empty((x.a.shape[0], x.b.shape[1]), dtype=x.out_dtype)
    return reference_result.gemm(x, integers=result.integers)


def conv2d_product(x: ConvProduct, check: Callable[[ConvProduct], object] | None = None) -> Tensor:
    """Compute `qsync::conv2d_product` on a CUDA device; `check` as in `gemm`."""
    geometry = (*x.size, *x.stride, *x.padding, *x.dilation)
    result = _by_kernel((*_key(x), *geometry, x.operation, x.out_dtype, x.tf32), x, check)
    if isinstance(result, Tensor):
        return result
    return reference_result.conv2d_product(x)


def _key(x: Product) -> Key:
    """Return the part of a call site's key without the scalar arguments."""
    a, b = x.a, x.b
    return (
        kernel_registry.refusals(), a.device, a.dtype, b.dtype, a.shape, b.shape, a.stride(),
        b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        x.a_scale is not None and (x.a_scale.dtype, x.a_scale.shape),
        x.b_scale is not None and (x.b_scale.dtype, x.b_scale.shape),
        x.bias is not None and x.bias.shape,
    )  # fmt: skip


def _by_kernel(key: Key, x: Any, check: Callable[[Any], object] | None) -> Tensor | ByTorch:
    site = cached_call.get(key)
    if site is None:
        if check is not None:
            check(x)
        site = cached_call.keep(key, _site(x))
    if isinstance(site, ByTorch):
        return site
    try:
        return site(x)
    except KernelError as error:
        launch_utils.failed(site.library, shown(site.problem), error)
        cached_call.pop(key, None)
        return ByTorch()


def _site(x: Product) -> CallSite | ByTorch:
    if not x.a.numel() or not x.b.numel() or (isinstance(x, ConvProduct) and 0 in x.size):
        return ByTorch()
    problem = gemm_problem(x) if isinstance(x, GemmProduct) else conv_problem(x)
    if _too_large(problem):
        launch_utils.note(shown(problem), "its sizes do not fit into 32 bits")
        return ByTorch()
    device = x.a.device
    result = decision(problem, device)
    if result.config is None:
        launch_utils.note(shown(problem), result.reason)
        return ByTorch(result.integers)
    library = launch_utils.library(unit_of(result.config), device, shown(problem))
    # Sizes and layouts may differ from those that the graph was compiled with. The library of their
    # decision may then be missing, while another loaded kernel serves the problem.
    if library is None and (other := loaded_decision(problem, device)).config is not None:
        result = other
        library = launch_utils.library(unit_of(other.config), device, shown(problem))
    if library is None or result.config is None:
        return ByTorch(result.integers)
    return call_site(library, result.config, problem, result.problem, x)


def _too_large(problem: Problem) -> bool:
    if isinstance(problem, GemmProblem):
        return too_large(problem.m, problem.n, problem.k)
    # Convolution kernels count the elements of a tensor in INT32.
    return min(problem.p, problem.q) < 1 or too_large(*map(math.prod, problem.shapes))


def call_site(
    library: Library, config: KernelConfig, problem: Problem, used: Problem, x: Product
) -> CallSite:
    """Return the call site of a kernel that runs `problem` as `used`, padded or re-laid-out.

    All calls share the metadata of the example arguments `x`, not their values.
    """
    if isinstance(x, GemmProduct):
        assert isinstance(used, GemmProblem)
        return _gemm_site(library, config, problem, used, x)
    assert isinstance(problem, ConvProblem) and isinstance(used, ConvProblem)
    return _conv_site(library, problem, used, x)


def _gemm_site(
    library: Library, config: KernelConfig, problem: Problem, used: GemmProblem, x: GemmProduct
) -> CallSite:
    m, n, k = used.m, used.n, used.k
    arguments = GemmArguments(
        lda=leading(x.a, used.a_major) or 0, ldb=leading(x.b, used.b_major) or 0, ldd=n,
        m=m, n=n, k=k,
        a_scale_per_row=used.a_scale == "channel", b_scale_per_column=used.b_scale == "channel",
        split=1, **launch_utils.device_arguments(x.a.device),
    )  # fmt: skip
    device, dtype = x.a.device, type_of(used.out)
    site = CallSite(library, problem, (m, n), (n, 1), dtype, device, m, n, arguments)
    if tuple(x.a.shape) != (m, k) or not aligned(x.a, used.a_major, config.alignment):
        site.first = lambda t: laid_out(t, m, k, used.a_major)
        arguments.lda = {"row": k, "column": m}[used.a_major]
    if tuple(x.b.shape) != (k, n) or not aligned(x.b, used.b_major, config.alignment):
        site.second = lambda t: laid_out(t, k, n, used.b_major)
        arguments.ldb = {"row": n, "column": k}[used.b_major]
    rows, columns = int(x.a.shape[0]), int(x.b.shape[1])
    if (m, n) != (rows, columns):
        site.part = lambda d: d[:rows, :columns].contiguous()
    return site


def _conv_site(
    library: Library, problem: ConvProblem, used: ConvProblem, x: ConvProduct
) -> CallSite:
    arguments = ConvArguments(
        n=used.n, h=used.h, w=used.w, c=used.c, k=used.k, r=used.r, s=used.s, p=used.p, q=used.q,
        pad_h=used.padding[0], pad_w=used.padding[1], stride_h=used.stride[0],
        stride_w=used.stride[1], dilation_h=used.dilation[0], dilation_w=used.dilation[1],
        b_scale_per_channel=used.b_scale == "channel", split=1,
        **launch_utils.device_arguments(x.a.device),
    )  # fmt: skip
    a, b, (n, h, w, c) = used.shapes
    shape, strides = (n, c, h, w), (h * w * c, 1, w * c, c)
    device, dtype = x.a.device, type_of(used.out)
    # The first operand of a convolution has at most one scale.
    site = CallSite(library, problem, shape, strides, dtype, device, 1, used.k, arguments)
    if not _is_packed(x.a, a):
        site.first = lambda t: channels_last(t, a[0], a[3])
    if not _is_packed(x.b, b):
        site.second = lambda t: channels_last(t, b[0], b[3])
    images, _, _, channels = problem.shapes[2]
    if used.shapes[2] != problem.shapes[2]:
        site.part = lambda d: _cut(d, images, channels)
    return site


def _cut(d: Tensor, images: int, channels: int) -> Tensor:
    """Return a channels-last copy of the first images and channels."""
    full = d.permute(0, 2, 3, 1)
    return full[:images, :, :, :channels].contiguous().permute(0, 3, 1, 2)


def _is_packed(t: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether `[n, c, h, w]` is channels-last `[n, h, w, c]`, dense and 16-byte aligned."""
    n, h, w, c = shape
    strides = zip(t.shape, t.stride(), (h * w * c, 1, w * c, c), strict=True)
    dense = all(size == 1 or stride == packed for size, stride, packed in strides)
    return tuple(t.shape) == (n, c, h, w) and dense and t.data_ptr() % VECTOR == 0
