"""Dispatch of GEMMs and convolutions on tensors: to a kernel, or to torch as the fallback.

This is the "front-end security wrapper" of LP-PyTorch (section VI). A kernel trusts its arguments,
so this module guarantees the types and layouts that the kernel was compiled for, 16-byte aligned
pointers, sizes in INT32, and memory on the device of the stream. `layout_convert` copies unsuitable
operands. torch computes the remaining cases, and `launch_utils.note` records the reason.

Decision and operand check are cached per operand layout (`call_cache`): a repeated call only fills
in pointers.

Invariant: kernels and torch (`reference_result`) agree up to the order of FP32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem, reference_result
from qsync_fx.backend.cuda.problem.problem_from_tensors import (
    ConvWindow,
    conv_problem,
    gemm_problem,
    too_large,
)
from qsync_fx.backend.cuda.runtime import call_cache, launch_utils
from qsync_fx.backend.cuda.runtime.call_cache import ByTorch, ConvSite, GemmSite
from qsync_fx.backend.cuda.runtime.device_state import decision, loaded_decision
from qsync_fx.backend.cuda.selection.select import KernelDecision
from qsync_fx.backend.cuda.tuning import shown
from qsync_fx.errors import KernelError


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
    *,
    check: Callable[..., Any] | None = None,
) -> Tensor:
    """Compute `qsync::gemm` on a CUDA device.

    Args:
        a, b, a_scale, b_scale, bias, out_dtype, tf32: arguments of `qsync::gemm`.
        check: receives the same arguments on a cache miss and raises if they are invalid.

    Returns:
        [M, N], `out_dtype`, row-major.
    """
    key = (
        kernel_registry.refusals(), a.device, a.dtype, b.dtype, a.shape, b.shape, a.stride(),
        b.stride(),
        a.data_ptr() & 15, b.data_ptr() & 15,
        None if a_scale is None else (a_scale.dtype, a_scale.shape),
        None if b_scale is None else (b_scale.dtype, b_scale.shape),
        None if bias is None else bias.shape, out_dtype, tf32,
    )  # fmt: skip
    site = call_cache.cached_call.get(key)
    if site is None:
        if check is not None:
            check(a, b, a_scale, b_scale, bias, out_dtype, tf32)
        site = call_cache.cached_call.keep(
            key, _gemm_site(a, b, a_scale, b_scale, bias, out_dtype, tf32)
        )
    if isinstance(site, GemmSite):
        try:
            return site(a, b, a_scale, b_scale, bias)
        except KernelError as error:
            launch_utils.failed(site.library, shown(site.problem), error)
            call_cache.cached_call.pop(key, None)
            return reference_result.gemm(a, b, a_scale, b_scale, bias, out_dtype)
    if not a.shape[0] or not b.shape[1]:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    integers = not isinstance(site, ByTorch) or site.integers
    return reference_result.gemm(a, b, a_scale, b_scale, bias, out_dtype, integers=integers)


def _gemm_site(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
) -> GemmSite | ByTorch:
    m, k, n = int(a.shape[0]), int(a.shape[1]), int(b.shape[1])
    if not m or not n or not k:
        return ByTorch()
    if too_large(m, n, k):
        launch_utils.note(f"gemm {m} x {n} x {k}", "its sizes do not fit into 32 bits")
        return ByTorch()
    problem = gemm_problem(a, b, a_scale, b_scale, bias, out_dtype, tf32)
    library, result = _chosen(problem, a.device)
    if library is None or result.config is None:
        return ByTorch(result.integers)
    assert isinstance(result.taken, GemmProblem)
    return GemmSite(library, result.config, problem, result.taken, a, b)


def conv2d_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    operation: ConvOperation,
    out_dtype: torch.dtype,
    tf32: bool,
    *,
    check: Callable[..., Any] | None = None,
) -> Tensor:
    """Compute `qsync::conv2d_product` on a CUDA device; `check` as in `gemm`."""
    key = (
        kernel_registry.refusals(), a.device, a.dtype, b.dtype, a.shape, b.shape, a.stride(),
        b.stride(),
        a.data_ptr() & 15, b.data_ptr() & 15,
        None if a_scale is None else (a_scale.dtype, a_scale.shape),
        None if b_scale is None else (b_scale.dtype, b_scale.shape),
        None if bias is None else bias.shape, *size, *stride, *padding, *dilation, operation,
        out_dtype, tf32,
    )  # fmt: skip
    site = call_cache.cached_call.get(key)
    if site is None:
        if check is not None:
            check(
                a,
                b,
                a_scale,
                b_scale,
                bias,
                size,
                stride,
                padding,
                dilation,
                operation,
                out_dtype,
                tf32,
            )
        window = ConvWindow(_pair(stride), _pair(padding), _pair(dilation))
        result = _conv_site(
            a, b, a_scale, b_scale, bias, _pair(size), window, operation, out_dtype, tf32
        )
        site = call_cache.cached_call.keep(key, result)
    if isinstance(site, ConvSite):
        try:
            return site(a, b, a_scale, b_scale, bias)
        except KernelError as error:
            launch_utils.failed(site.library, shown(site.problem), error)
            call_cache.cached_call.pop(key, None)
    return reference_result.conv2d_product(
        a, b, a_scale, b_scale, bias, size, stride, padding, dilation, operation, out_dtype
    )


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    height, width = sizes
    return int(height), int(width)


def _conv_site(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    size: tuple[int, int],
    window: ConvWindow,
    operation: ConvOperation,
    out_dtype: torch.dtype,
    tf32: bool,
) -> ConvSite | ByTorch:
    if not a.numel() or not b.numel() or 0 in size:
        return ByTorch()
    problem = conv_problem(a, b, a_scale, b_scale, bias, size, window, operation, out_dtype, tf32)
    if min(problem.p, problem.q) < 1 or _conv_too_large(problem):
        launch_utils.note(shown(problem), "its sizes do not fit into 32 bits")
        return ByTorch()
    library, result = _chosen(problem, a.device)
    if library is None or result.config is None:
        return ByTorch()
    assert isinstance(result.taken, ConvProblem)
    return ConvSite(library, result.config, problem, result.taken, a, b)


def _conv_too_large(p: ConvProblem) -> bool:
    # Convolution kernels count the elements of a tensor in INT32.
    return too_large(p.n * p.h * p.w * p.c, p.n * p.p * p.q * p.k, p.k * p.r * p.s * p.c)


def _chosen(
    problem: GemmProblem | ConvProblem, device: torch.device
) -> tuple[Library | None, KernelDecision]:
    """Return the library and the decision for a problem; None and a noted reason for torch.

    Sizes and layouts may differ from those that the graph was compiled with. The library of their
    decision may then be missing, while another loaded kernel serves the problem.
    """
    result = decision(problem, device)
    if result.config is None:
        launch_utils.note(shown(problem), result.reason)
        return None, result
    library = launch_utils.library(kernel_registry.unit_of(result.config), device, shown(problem))
    if library is None and (other := loaded_decision(problem, device)).config is not None:
        return launch_utils.library(
            kernel_registry.unit_of(other.config), device, shown(problem)
        ), other
    return library, result


def run_gemm(
    library: Library,
    config: KernelConfig,
    used: GemmProblem,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Run a kernel as the problem `used` on operands of `qsync::gemm`.

    The operands' own sizes determine the result's shape.

    Raises:
        KernelError: the kernel does not accept these arguments or cannot be launched.
    """
    return GemmSite(library, config, used, used, a, b)(a, b, a_scale, b_scale, bias)


def run_conv(
    library: Library,
    config: KernelConfig,
    problem: ConvProblem,
    used: ConvProblem,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Run a kernel on operands of `qsync::conv2d_product`; see `run_gemm`."""
    return ConvSite(library, config, problem, used, a, b)(a, b, a_scale, b_scale, bias)
