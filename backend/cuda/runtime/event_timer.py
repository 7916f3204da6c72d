"""GPU timing of kernels and of the equivalent torch product by CUDA events.

A measurement is a sequence of launches that starts when all are queued, over copies of the operands
that exceed the L2 cache together. A kernel is timed only after its result has been verified. The
torch product is one product and at most one elementwise pass, as in a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import unit_of
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import (
    ConvProduct,
    GemmProblem,
    GemmProduct,
    Major,
    Problem,
    type_of,
)
from qsync_fx.backend.cuda.problem.reference_result import CONVERTED, FP8
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.cuda.tuning import Candidate, TuningError, name_of
from qsync_fx.errors import KernelError
from qsync_fx.torch_internals import _scaled_mm, _sleep


def operands(
    problem: Problem, device: torch.device, generator: torch.Generator | None = None
) -> GemmProduct | ConvProduct:
    """Return a product with random operands, since a GPU clocks higher if it multiplies zeros."""

    def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, device=device, generator=generator)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def positive(kind: str, shape: tuple[int, ...]) -> Tensor | None:
        if kind == "none":
            return None
        if kind == "tensor":
            shape = ()
        return torch.rand(shape, device=device, generator=generator) + 0.5

    def matrix(shape: tuple[int, ...], dtype: torch.dtype, major: Major) -> Tensor:
        if major == "row":
            return values(shape, dtype)
        return values(shape[::-1], dtype).t()

    a_type, b_type, out = type_of(problem.a), type_of(problem.b), type_of(problem.out)
    first, second, result = problem.shapes
    tf32 = "tf32" in (problem.a, problem.b)
    bias = None
    if problem.bias:
        bias = torch.randn(result[-1], device=device, generator=generator)
    if isinstance(problem, GemmProblem):
        a, b = matrix(first, a_type, problem.a_major), matrix(second, b_type, problem.b_major)
        a_scale = positive(problem.a_scale, (problem.m, 1))
        b_scale = positive(problem.b_scale, (1, problem.n))
        return GemmProduct(a, b, a_scale, b_scale, bias, out, tf32)
    p = problem
    a, b = values(first, a_type).permute(0, 3, 1, 2), values(second, b_type).permute(0, 3, 1, 2)
    a_scale, b_scale = positive(p.a_scale, ()), positive(p.b_scale, (1, p.k, 1, 1))
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    return ConvProduct(
        a, b, a_scale, b_scale, bias, size, p.stride, p.padding, p.dilation, p.operation, out, tf32
    )  # fmt: skip


def peer(problem: Problem, value: GemmProduct | ConvProduct) -> Callable[[], Tensor]:
    """Return a function that computes torch's product, as the problem's output format.

    One elementwise pass represents the epilogue; its factor need not equal the scales.
    """
    product = _gemm(value) if isinstance(value, GemmProduct) else _conv(value)
    out = type_of(problem.out)
    bare = value.a_scale is None and value.b_scale is None
    bare = bare and (value.bias is None or _adds_bias(value))
    factor = torch.ones((), device=value.a.device)
    for scale in (value.b_scale, value.a_scale):
        if scale is not None and not scale.dim():
            factor = scale

    def run() -> Tensor:
        total = product()
        if bare and total.dtype == out:
            return total
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=out))

    return run


def _adds_bias(x: GemmProduct | ConvProduct) -> bool:
    """Return whether cuBLAS adds the bias in the epilogue, as it does in `F.linear`."""
    plain = x.a_scale is None and x.b_scale is None and x.a.dtype == x.b.dtype == x.out_dtype
    return isinstance(x, GemmProduct) and plain


def _gemm(x: GemmProduct) -> Callable[[], Tensor]:
    a, b, bias = x.a, x.b, x.bias
    if bias is not None and _adds_bias(x):
        thin = bias.to(a.dtype)
        return lambda: torch.addmm(thin, a, b)
    m, k, n = *a.shape, b.shape[1]
    if a.dtype == torch.int8 and reference_result.takes_integers(m, n, k):
        return lambda: reference_result.integer_product(a, b.t())
    if a.dtype in FP8 and reference_result.takes_fp8(a, b):
        item = torch.ones((), device=a.device)
        return lambda: _scaled_mm(a, b, item, item, out_dtype=x.out_dtype)
    narrow = CONVERTED.get(a.dtype, a.dtype)
    return lambda: a.to(narrow) @ b.to(narrow)


def _conv(x: ConvProduct) -> Callable[[], Tensor]:
    narrow = CONVERTED.get(x.a.dtype, x.a.dtype)
    geometry, convolve = (x.stride, x.padding, x.dilation), reference_result.convolve
    # The casts count: torch has no convolutions of one-byte operands.
    return lambda: convolve(x.a.to(narrow), x.b.to(narrow), x.size, geometry, x.operation)


def differs(result: Tensor, x: GemmProduct | ConvProduct) -> str:
    """Return how a result differs from the reference beyond rounding; "" if it does not."""
    compute: Any = reference_result.conv2d_product
    if isinstance(x, GemmProduct):
        compute = reference_result.gemm
    want = compute(x._replace(out_dtype=torch.float32))
    largest, error = want.abs().amax(), (result.float() - want).abs().amax()
    # The reference itself may have been rounded to BF16.
    if bool(error <= 0.02 * largest):
        return ""
    return f"its largest error is {float(error / largest):.2g} of the largest value"


COPIES_BYTES: Final = 256 * 2**20
"""Bytes of operand copies: more than the largest L2 cache (50 MB on an H100, 96 MB on an L40)."""

MOST_COPIES: Final = 8
BUSY_CYCLES: Final = 4_000_000
"""GPU cycles before the first launch: 2 ms, in which Python queues about 100 launches."""

SECONDS: Final = 0.005
"""Target duration of one measurement, in seconds."""

MOST_LAUNCHES: Final = 50


class EventTimer:
    """Timer of the candidates of one problem on one device."""

    def __init__(self, problem: Problem, used: Problem, device: torch.device) -> None:
        """Create copies of the operands; kernels run `used`, padded or re-laid-out."""
        self._problem, self._used_problem, self._device = problem, used, device
        self._runs: dict[str, list[Callable[[], Tensor]]] = {}
        self._launches: dict[str, int] = {}
        try:
            first = operands(problem, device)
            size = sum(t.nbytes for t in (first.a, first.b))
            count = max(2, min(MOST_COPIES, COPIES_BYTES // max(size, 1)))
            self._copies = [first, *(operands(problem, device) for _ in range(count - 1))]
        except torch.OutOfMemoryError as error:
            raise _no_memory(error) from error

    def measure(self, candidate: Candidate) -> list[float]:
        """Return the mean seconds per launch of one sequence, as a list of one value."""
        name = name_of(candidate)
        try:
            if name not in self._runs:
                self._prepare(candidate)
            with torch.no_grad():
                return [row_seconds(self._runs[name], self._launches[name], self._device)]
        except torch.OutOfMemoryError as error:
            raise _no_memory(error) from error
        except RuntimeError as error:
            raise KernelError(f"it failed: {str(error).splitlines()[0]}", where=name) from error

    def _prepare(self, candidate: Candidate) -> None:
        """Compile, verify and warm up a candidate, and choose its launches per sequence."""
        name = name_of(candidate)
        if isinstance(candidate, str):
            runs = [peer(self._problem, value) for value in self._copies]
        else:
            problem, used = self._problem, self._used_problem
            runs = [call_of(candidate, problem, used, value) for value in self._copies]
            if wrong := differs(runs[0](), self._copies[0]):
                raise TuningError(f"its result is wrong: {wrong}", where=name)
        with torch.no_grad():
            row_seconds(runs, len(runs), self._device)
            took = row_seconds(runs, len(runs), self._device)
        self._launches[name] = max(len(runs), min(MOST_LAUNCHES, int(SECONDS / took)))
        self._runs[name] = runs


def row_seconds(runs: Sequence[Callable[[], object]], launches: int, device: torch.device) -> float:
    """Return the mean seconds per launch of a sequence that starts when all are queued."""
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        _sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for index in range(launches):
            runs[index % len(runs)]()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / launches


def call_of(
    config: KernelConfig, problem: Problem, used: Problem, value: GemmProduct | ConvProduct
) -> Callable[[], Tensor]:
    """Return a function that runs a kernel on operands, without dispatch; compile its library."""
    library = kernel_registry.library(unit_of(config))
    assert library is not None
    site = launch.call_site(library, config, problem, used, value)
    return lambda: site(value)


def _no_memory(error: Exception) -> TuningError:
    return TuningError(
        f"the device has too little free memory for this measurement: {str(error).splitlines()[0]}",
        do="free memory on the device, or tune smaller batches",
    )
