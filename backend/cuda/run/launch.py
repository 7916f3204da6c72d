"""From tensors to a running kernel: what LP-PyTorch (section VI) calls the front-end security wrapper.

A kernel believes what it is told. Here stands what has to be true before it is told anything: types and layouts of the problem it was
compiled for, pointers at multiples of 16 bytes, sizes in INT32, memory on the device that the stream belongs to. Operands that do not
suit are copied, by `converting`; what does not suit then is computed by torch, and `reasons` says why.

Invariant: the result is that of `fallback`, up to the order of FP32 sums, whichever way is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.cuda.choose.select import Decision
from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.libraries import kernels
from qsync_fx.backend.cuda.libraries.abi import ConvArguments, GemmArguments
from qsync_fx.backend.cuda.libraries.library import Library
from qsync_fx.backend.cuda.problem import Activation, ConvOperation, ConvProblem, GemmProblem, Major, fallback, padding
from qsync_fx.backend.cuda.problem.operands import (
    Window,
    aligned,
    conv_problem,
    gemm_problem,
    leading,
    too_large,
    type_of,
)
from qsync_fx.backend.cuda.run import calls, converting, reasons
from qsync_fx.backend.cuda.run.device import decision
from qsync_fx.backend.cuda.tune.problem_json import shown
from qsync_fx.errors import KernelError


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    activation: Activation,
    out_dtype: torch.dtype,
    tf32: bool,
) -> Tensor:
    """Computes `qsync::gemm` on a CUDA device."""
    how = a_scale, b_scale, bias, activation, out_dtype
    m, k, n = int(a.shape[0]), int(a.shape[1]), int(b.shape[1])
    if not m or not n:
        return a.new_empty((m, n), dtype=out_dtype)
    if not k or too_large(m, n, k):
        if k:
            reasons.note(f"gemm {m} x {n} x {k}", "its sizes do not fit 32 bits")
        return fallback.gemm(a, b, *how)
    problem = gemm_problem(a, b, *how, tf32)
    found = decision(problem, a.device)
    library = _library(problem, found, a.device)
    if library is None or found.config is None:
        return fallback.gemm(a, b, *how, integers=found.integers)
    try:
        return run_gemm(library, found.config, found.taken, a, b, a_scale, b_scale, bias)  # type: ignore[arg-type]
    except KernelError as error:
        reasons.note(shown(problem), error.what)
        return fallback.gemm(a, b, *how)


def conv2d_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    size: tuple[int, int],
    window: Window,
    operation: ConvOperation,
    activation: Activation,
    out_dtype: torch.dtype,
    tf32: bool,
) -> Tensor:
    """Computes `qsync::conv2d_product` on a CUDA device."""
    operands = a, b, a_scale, b_scale, bias

    def torch_computes() -> Tensor:
        how = window.stride, window.padding, window.dilation
        return fallback.conv2d_product(*operands, size, *how, operation, activation, out_dtype)

    if not a.numel() or not b.numel() or 0 in size:
        return torch_computes()
    problem = conv_problem(*operands, size, window, operation, activation, out_dtype, tf32)
    if min(problem.p, problem.q) < 1 or _conv_too_large(problem):
        reasons.note(shown(problem), "its sizes do not fit 32 bits")
        return torch_computes()
    found = decision(problem, a.device)
    library = _library(problem, found, a.device)
    if library is None or found.config is None:
        return torch_computes()
    try:
        return run_conv(library, found.config, problem, found.taken, *operands)  # type: ignore[arg-type]
    except KernelError as error:
        reasons.note(shown(problem), error.what)
        return torch_computes()


def _conv_too_large(p: ConvProblem) -> bool:
    # Convolution kernels count elements of a tensor in INT32.
    return too_large(p.n * p.h * p.w * p.c, p.n * p.p * p.q * p.k, p.k * p.r * p.s * p.c)


def _library(problem: GemmProblem | ConvProblem, found: Decision, device: torch.device) -> Library | None:
    """Returns the library that a decision names; None, with a reason kept, where torch is to compute."""
    if found.config is None:
        reasons.note(shown(problem), found.reason)
        return None
    return calls.library(kernels.unit_of(found.config), device, shown(problem))


def run_gemm(
    library: Library,
    config: KernelConfig,
    taken: GemmProblem,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Runs a kernel on operands of `qsync::gemm`, which it takes as the problem `taken`; the operands' sizes decide the result's.

    Raises:
        KernelError: the kernel does not take these arguments, or cannot be started.
    """
    m, n = int(a.shape[0]), int(b.shape[1])
    with calls.guarded(a.device):
        a = _matrix(a, taken.m, taken.k, taken.a_major, config.alignment)
        b = _matrix(b, taken.k, taken.n, taken.b_major, config.alignment)
        d = a.new_empty((taken.m, taken.n), dtype=type_of(taken.out))
        rows, columns = padding.filled_vector(a_scale, taken.m), padding.filled_vector(b_scale, taken.n)
        added = padding.filled_vector(bias, taken.n)
        arguments = GemmArguments(
            a=a.data_ptr(), b=b.data_ptr(), d=d.data_ptr(),
            a_scale=calls.address(rows), b_scale=calls.address(columns), bias=calls.address(added),
            lda=leading(a, taken.a_major), ldb=leading(b, taken.b_major), ldd=taken.n,
            m=taken.m, n=taken.n, k=taken.k,
            a_scale_per_row=taken.a_scale == "channel", b_scale_per_column=taken.b_scale == "channel",
            split=1, **calls.place(a.device),
        )  # fmt: skip
        calls.run(library, arguments, a.device)
    return d if (taken.m, taken.n) == (m, n) else d[:m, :n].contiguous()


def run_conv(
    library: Library,
    config: KernelConfig,
    problem: ConvProblem,
    taken: ConvProblem,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Runs a kernel on operands of `qsync::conv2d_product`, as `run_gemm` does."""
    p, t = problem, taken
    x, weight, y = (t.n, t.c), (t.k, t.c), (t.n, t.k)
    first, second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
    shape, whole = {
        "fprop": ((p.n, p.p, p.q, p.k), (t.n, t.p, t.q, t.k)),
        "dgrad": ((p.n, p.h, p.w, p.c), (t.n, t.h, t.w, t.c)),
        "wgrad": ((p.k, p.r, p.s, p.c), (t.k, t.r, t.s, t.c)),
    }[p.operation]
    with calls.guarded(a.device):
        a, b = _last(a, *first), _last(b, *second)
        d = a.new_empty(whole, dtype=type_of(t.out))
        channels, added = padding.filled_vector(b_scale, t.k), padding.filled_vector(bias, t.k)
        (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w) = t.padding, t.stride, t.dilation
        arguments = ConvArguments(
            a=a.data_ptr(), b=b.data_ptr(), d=d.data_ptr(),
            a_scale=calls.address(a_scale), b_scale=calls.address(channels), bias=calls.address(added),
            n=t.n, h=t.h, w=t.w, c=t.c, k=t.k, r=t.r, s=t.s, p=t.p, q=t.q,
            pad_h=pad_h, pad_w=pad_w, stride_h=stride_h, stride_w=stride_w, dilation_h=dilation_h, dilation_w=dilation_w,
            b_scale_per_channel=t.b_scale == "channel", split=1, **calls.place(a.device),
        )  # fmt: skip
        calls.run(library, arguments, a.device)
    if whole != shape:
        d = d[: shape[0], :, :, : shape[3]].contiguous()
    return d.permute(0, 3, 1, 2)


def _matrix(t: Tensor, rows: int, columns: int, way: Major, alignment: int) -> Tensor:
    """Returns a matrix as a kernel takes it, a copy where it lies otherwise."""
    if tuple(t.shape) == (rows, columns) and aligned(t, way, alignment):
        return t
    return converting.laid_out(t, rows, columns, way)


def _last(t: Tensor, first: int, second: int) -> Tensor:
    """Returns a tensor with its channels last, without gaps, a copy where it lies otherwise."""
    n, c, h, w = t.shape
    packed = (h * w * c, 1, w * c, c)
    lies = all(size == 1 or have == want for size, have, want in zip(t.shape, t.stride(), packed, strict=True))
    if (n, c) == (first, second) and lies and t.data_ptr() % padding.VECTOR == 0:
        return t
    return converting.channels_last(t, first, second)
