"""GPU timing of kernels and of the equivalent torch product by CUDA events.

A measurement is a sequence of back-to-back launches. The GPU is busy with a wait kernel until all
launches are queued, so launch latency in Python does not count. The launches cycle through copies
of the operands that exceed the L2 cache together, as the operands of a training step do.

Invariant: a kernel is timed only after its result has been verified. The torch product does no more
than a compiled graph without kernels: one product in the best format that torch supports for the
operands, and at most one pass over the result, since a compiler fuses scales, bias and rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem_from_tensors import ConvProduct, GemmProduct, type_of
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.cuda.tuning import Candidate, TuningError, name_of
from qsync_fx.errors import KernelError

_NARROW: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def operands(
    problem: Problem, device: torch.device, generator: torch.Generator | None = None
) -> GemmProduct | ConvProduct:
    """Return a product with random operands of a problem.

    They are never zero: a GPU that multiplies zeros draws less power and clocks higher.
    """

    def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, device=device, generator=generator)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def positive(kind: str, shape: tuple[int, ...]) -> Tensor | None:
        if kind == "none":
            return None
        size = shape if kind == "channel" else ()
        return torch.rand(size, device=device, generator=generator) + 0.5

    a_type, b_type = type_of(problem.a), type_of(problem.b)
    if isinstance(problem, GemmProblem):
        m, n, k = problem.m, problem.n, problem.k
        a = values((m, k), a_type) if problem.a_major == "row" else values((k, m), a_type).t()
        b = values((k, n), b_type) if problem.b_major == "row" else values((n, k), b_type).t()
        scales = positive(problem.a_scale, (m, 1)), positive(problem.b_scale, (1, n))
        channels = n
    else:
        p, channels = problem, problem.k
        x, weight, y = (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.c), (p.n, p.p, p.q, p.k)
        first, second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
        a, b = values(first, a_type).permute(0, 3, 1, 2), values(second, b_type).permute(0, 3, 1, 2)
        scales = positive(p.a_scale, ()), positive(p.b_scale, (1, p.k, 1, 1))
    bias = torch.randn(channels, device=device, generator=generator) if problem.bias else None
    tensors = a, b, *scales, bias
    out, tf32 = type_of(problem.out), "tf32" in (problem.a, problem.b)
    if isinstance(problem, GemmProblem):
        return GemmProduct(*tensors, out, tf32)
    p = problem
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    return ConvProduct(*tensors, size, p.stride, p.padding, p.dilation, p.operation, out, tf32)


def peer(problem: Problem, value: GemmProduct | ConvProduct) -> Callable[[], Tensor]:
    """Return a function that computes torch's product of the operands.

    Its result is in the problem's output format. One elementwise pass represents the epilogue; its
    factor need not equal the scales.
    """
    if isinstance(value, GemmProduct):
        assert isinstance(problem, GemmProblem)
        product = _gemm(problem, value)
    else:
        product = _conv(value)
    out = type_of(problem.out)
    bare = value.a_scale is None and value.b_scale is None and value.bias is None

    def run() -> Tensor:
        total = product()
        if bare and total.dtype == out:
            return total
        # One elementwise pass: the value of the factor does not affect the time.
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=out))

    scale = value.a_scale if value.a_scale is not None else value.b_scale
    factor = torch.ones((), device=value.a.device) if scale is None or scale.dim() else scale
    return run


def _gemm(problem: GemmProblem, x: GemmProduct) -> Callable[[], Tensor]:
    a, b = x.a, x.b
    if a.dtype == torch.int8:
        if reference_result.takes_integers(problem.m, problem.n, problem.k):
            return lambda: reference_result.integer_product(a, b.t())
        return lambda: a.to(torch.bfloat16) @ b.to(torch.bfloat16)
    if a.dtype in _NARROW:
        if reference_result.takes_fp8(a, b):
            item = torch.ones((), device=a.device)
            return lambda: torch._scaled_mm(a, b, item, item, out_dtype=x.out_dtype)
        return lambda: a.to(torch.bfloat16) @ b.to(torch.bfloat16)
    return lambda: a @ b


def _conv(x: ConvProduct) -> Callable[[], Tensor]:
    narrow = torch.bfloat16 if x.a.dtype.itemsize == 1 else x.a.dtype
    geometry = x.stride, x.padding, x.dilation

    def run() -> Tensor:
        # The casts count: torch has no convolutions of one-byte operands.
        return reference_result.convolve(
            x.a.to(narrow), x.b.to(narrow), x.size, geometry, x.operation
        )

    return run


def differs(result: Tensor, x: GemmProduct | ConvProduct) -> str:
    """Return how a result differs from the reference beyond rounding; "" if it does not."""
    if isinstance(x, GemmProduct):
        want = reference_result.gemm(x._replace(out_dtype=torch.float32))
    else:
        want = reference_result.conv2d_product(x._replace(out_dtype=torch.float32))
    largest = want.abs().amax()
    error = (result.float() - want).abs().amax()
    # The reference itself may have been rounded to BF16.
    if bool(error <= 0.02 * largest):
        return ""
    return f"its largest error is {float(error / largest):.2g} of the largest value"


COPIES_BYTES: Final = 256 * 2**20
"""Bytes of operand copies: more than the largest L2 cache (50 MB on an H100, 96 MB on an L40)."""

MOST_COPIES: Final = 8
BUSY_CYCLES: Final = 4_000_000
"""GPU cycles of the wait before the first launch.

This is about 2 ms, in which Python queues about 100 launches.
"""

SECONDS: Final = 0.005
"""Target duration of one measurement, in seconds."""

MOST_LAUNCHES: Final = 50


class EventTimer:
    """Timer of the candidates of one problem on one device."""

    def __init__(self, problem: Problem, used: Problem, device: torch.device) -> None:
        """Create the operands and their copies.

        Args:
            problem: the problem to measure.
            used: the padded or re-laid-out problem that kernels run (`select.way`).
            device: a CUDA device.

        Raises:
            TuningError: the device has too little memory.
        """
        self._problem, self._taken, self._device = problem, used, device
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
            return [self._row(self._runs[name], self._launches[name])]
        except torch.OutOfMemoryError as error:
            raise _no_memory(error) from error
        except RuntimeError as error:
            raise KernelError(f"it failed: {str(error).splitlines()[0]}", where=name) from error

    def _prepare(self, candidate: Candidate) -> None:
        """Compile, verify and warm up a candidate, and choose its launches per sequence."""
        runs = [self._runner(candidate, value) for value in self._copies]
        if not isinstance(candidate, str):
            wrong = differs(runs[0](), self._copies[0])
            if wrong:
                raise TuningError(f"its result is wrong: {wrong}", where=candidate.name)
        self._row(runs, len(runs))
        took = self._row(runs, len(runs))
        self._launches[name_of(candidate)] = max(len(runs), min(MOST_LAUNCHES, int(SECONDS / took)))
        self._runs[name_of(candidate)] = runs

    def _runner(
        self, candidate: Candidate, value: GemmProduct | ConvProduct
    ) -> Callable[[], Tensor]:
        if isinstance(candidate, str):
            return peer(self._problem, value)
        return call_of(candidate, self._problem, self._taken, value)

    def _row(self, runs: list[Callable[[], Tensor]], launches: int) -> float:
        with torch.cuda.device(self._device), torch.no_grad():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            for index in range(launches):
                runs[index % len(runs)]()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / launches


def call_of(
    config: KernelConfig, problem: Problem, used: Problem, value: GemmProduct | ConvProduct
) -> Callable[[], Tensor]:
    """Return a function that runs a kernel on operands; compile its library.

    The call makes neither the dispatch decision nor its checks.

    Args:
        problem, used: as in `EventTimer`.
    """
    library = kernel_registry.library(kernel_registry.unit_of(config))
    assert library is not None
    if isinstance(value, GemmProduct):
        assert isinstance(used, GemmProblem)
        matrix, product = used, value
        return lambda: launch.run_gemm(library, config, matrix, product)
    assert isinstance(problem, ConvProblem) and isinstance(used, ConvProblem)
    images, full, images_product = problem, used, value
    return lambda: launch.run_conv(library, config, images, full, images_product)


def _no_memory(error: Exception) -> TuningError:
    return TuningError(
        f"the device has too little free memory for this measurement: {str(error).splitlines()[0]}",
        do="free memory on the device, or tune smaller batches",
    )
