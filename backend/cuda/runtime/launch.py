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

from collections.abc import Callable

import torch
from torch import Tensor

from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem, reference_result
from qsync_fx.backend.cuda.problem.problem_from_tensors import (
    ConvProduct,
    GemmProduct,
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

Product = GemmProduct | ConvProduct


def gemm(x: GemmProduct, check: Callable[[GemmProduct], object] | None = None) -> Tensor:
    """Compute `qsync::gemm` on a CUDA device.

    Args:
        check: called on a cache miss; raises if the arguments are invalid.

    Returns:
        [M, N], `out_dtype`, row-major.
    """
    key = (*_key(x), x.out_dtype, x.tf32)
    site = call_cache.cached_call.get(key)
    if site is None:
        if check is not None:
            check(x)
        site = call_cache.cached_call.keep(key, _gemm_site(x))
    if isinstance(site, GemmSite):
        try:
            return site(x)
        except KernelError as error:
            _failed(key, site, error)
            return reference_result.gemm(x)
    if not x.a.shape[0] or not x.b.shape[1]:
        return x.a.new_empty((x.a.shape[0], x.b.shape[1]), dtype=x.out_dtype)
    assert isinstance(site, ByTorch)
    return reference_result.gemm(x, integers=site.integers)


def conv2d_product(x: ConvProduct, check: Callable[[ConvProduct], object] | None = None) -> Tensor:
    """Compute `qsync::conv2d_product` on a CUDA device; `check` as in `gemm`."""
    geometry = (*x.size, *x.stride, *x.padding, *x.dilation)
    key = (*_key(x), *geometry, x.operation, x.out_dtype, x.tf32)
    site = call_cache.cached_call.get(key)
    if site is None:
        if check is not None:
            check(x)
        site = call_cache.cached_call.keep(key, _conv_site(x))
    if isinstance(site, ConvSite):
        try:
            return site(x)
        except KernelError as error:
            _failed(key, site, error)
    return reference_result.conv2d_product(x)


def _key(x: Product) -> call_cache.Key:
    """Return what a call site depends on, except the scalar arguments."""
    a, b = x.a, x.b
    return (
        kernel_registry.refusals(), a.device, a.dtype, b.dtype, a.shape, b.shape, a.stride(),
        b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        None if x.a_scale is None else (x.a_scale.dtype, x.a_scale.shape),
        None if x.b_scale is None else (x.b_scale.dtype, x.b_scale.shape),
        None if x.bias is None else x.bias.shape,
    )  # fmt: skip


def _failed(key: call_cache.Key, site: GemmSite | ConvSite, error: KernelError) -> None:
    launch_utils.failed(site.library, shown(site.problem), error)
    call_cache.cached_call.pop(key, None)


def _gemm_site(x: GemmProduct) -> GemmSite | ByTorch:
    m, k, n = int(x.a.shape[0]), int(x.a.shape[1]), int(x.b.shape[1])
    if not m or not n or not k:
        return ByTorch()
    if too_large(m, n, k):
        launch_utils.note(f"gemm {m} x {n} x {k}", "its sizes do not fit into 32 bits")
        return ByTorch()
    problem = gemm_problem(x)
    library, result = _chosen(problem, x.a.device)
    if library is None or result.config is None:
        return ByTorch(result.integers)
    assert isinstance(result.taken, GemmProblem)
    return GemmSite(library, result.config, problem, result.taken, x)


def _conv_site(x: ConvProduct) -> ConvSite | ByTorch:
    if not x.a.numel() or not x.b.numel() or 0 in x.size:
        return ByTorch()
    problem = conv_problem(x)
    if min(problem.p, problem.q) < 1 or _conv_too_large(problem):
        launch_utils.note(shown(problem), "its sizes do not fit into 32 bits")
        return ByTorch()
    library, result = _chosen(problem, x.a.device)
    if library is None or result.config is None:
        return ByTorch()
    assert isinstance(result.taken, ConvProblem)
    return ConvSite(library, result.config, problem, result.taken, x)


def _conv_too_large(p: ConvProblem) -> bool:
    # Convolution kernels count the elements of a tensor in INT32.
    return too_large(p.n * p.h * p.w * p.c, p.n * p.p * p.q * p.k, p.k * p.r * p.s * p.c)


def _chosen(problem: Problem, device: torch.device) -> tuple[Library | None, KernelDecision]:
    """Return the library and the decision for a problem; None and a noted reason for torch.

    Sizes and layouts may differ from those that the graph was compiled with. The library of their
    decision may then be missing, while another loaded kernel serves the problem.
    """
    result = decision(problem, device)
    if result.config is None:
        launch_utils.note(shown(problem), result.reason)
        return None, result
    library = _library(result.config, problem, device)
    if library is None and (other := loaded_decision(problem, device)).config is not None:
        return _library(other.config, problem, device), other
    return library, result


def _library(config: KernelConfig, problem: Problem, device: torch.device) -> Library | None:
    return launch_utils.library(kernel_registry.unit_of(config), device, shown(problem))


def run_gemm(library: Library, config: KernelConfig, used: GemmProblem, x: GemmProduct) -> Tensor:
    """Run a kernel as the problem `used` on operands of `qsync::gemm`.

    The operands' own sizes determine the result's shape.

    Raises:
        KernelError: the kernel does not accept these arguments or cannot be launched.
    """
    return GemmSite(library, config, used, used, x)(x)


def run_conv(
    library: Library, config: KernelConfig, problem: ConvProblem, used: ConvProblem, x: ConvProduct
) -> Tensor:
    """Run a kernel on operands of `qsync::conv2d_product`; see `run_gemm`."""
    return ConvSite(library, config, problem, used, x)(x)
