"""Unusable kernels: a refused kernel falls back to the next candidate, a kernel that cannot be
launched is disabled, and steps do not wait for a compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cuda_launch import CPU, whole

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_registry
from qsync_fx.backend.cuda.kernel_build.compiler import Built
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import GemmProduct
from qsync_fx.backend.cuda.runtime import launch, launch_utils, quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import MOST_REFUSED, assumed, decision
from qsync_fx.backend.numerics import reference
from qsync_fx.backend.operators.gemm import gemm
from qsync_fx.errors import (
    KernelError,
    PlanWarning,
    PrecisionError,
    RefusedKernelError,
    ToolchainError,
)
from qsync_fx.formats import precision
from tests.support.cuda.large_products import INT8

SEED = torch.tensor([7])
A, B = whole((2048, 2048), "int8"), whole((2048, 2048), "int8").t()
PRODUCT = GemmProduct(A, B, None, None, None)


@pytest.fixture(autouse=True)
def _nothing_had(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_registry, "_had", {})
    monkeypatch.setattr(kernel_registry, "_refused", set())
    monkeypatch.setattr(kernel_registry, "_prepared", False)
    launch_utils.forget()
    with assumed("sm_80", on="cpu"):
        yield


def config() -> KernelConfig | None:
    return decision(INT8, CPU).config


def builds(monkeypatch: pytest.MonkeyPatch, errors: dict[str, KernelError]) -> list[str]:
    """Make the compiler fail with `errors` by unit name; return a list of the requested names."""
    names: list[str] = []

    def attempt(units: Sequence[TranslationUnit], **options: Any) -> Built:
        names.extend(unit.name for unit in units)
        return Built(
            {}, {unit: errors.get(unit.name, KernelError("not in this test")) for unit in units}
        )

    monkeypatch.setattr(compiler, "attempt", attempt)
    return names


def test_refused_kernels_fall_back_to_candidates_then_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: dict[str, KernelError] = {}
    builds(monkeypatch, errors)
    tried: list[str] = []
    while (selected := config()) is not None:
        tried.append(selected.name)
        errors[selected.name] = RefusedKernelError(
            "the kernel must not be used: it spills 8 bytes", where=selected.name
        )
        kernel_registry.prepare([codegen.unit_of(selected)])
    assert len(tried) == len(set(tried)) == MOST_REFUSED
    assert "it spills 8 bytes" in decision(INT8, CPU).reason


def test_compile_errors_fall_back_but_memory_errors_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = config()
    assert first is not None
    killed, broken = (
        ToolchainError("nvcc failed with status 137"),
        ToolchainError("nvcc failed with status 2"),
    )
    broken.of_the_source = True
    for error, gives_way in ((killed, False), (broken, True)):
        kernel_registry._had.clear()
        builds(monkeypatch, {first.name: error})
        kernel_registry.prepare([codegen.unit_of(first)])
        assert (config() != first) is gives_way


def test_no_step_waits_for_a_product_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a product that was unknown when the graph was compiled: torch computes it without a
    compilation.
    """
    monkeypatch.setattr(kernel_registry, "_stored", lambda unit: False)
    compiled = builds(monkeypatch, {})
    kernel_registry.prepare_graph([])
    result = launch.gemm(PRODUCT)
    assert torch.equal(result, reference_result.gemm(PRODUCT)) and compiled == []
    assert any(
        "a step never waits for a compiler" in why for why in launch_utils.reasons().values()
    )


class Handle(SimpleNamespace):
    """Functions of a library whose launches return these statuses in turn, and then 0."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.runs = list(statuses), 0
        super().__init__(
            qsync_can_implement=lambda x: 0,
            qsync_workspace=lambda x: 0,
            qsync_error=lambda s: b"invalid argument",
        )

    def qsync_run(self, x: Any, workspace: int, stream: int) -> int:
        self.runs += 1
        return self.statuses.pop(0) if self.statuses else 0


def loaded(*statuses: int) -> Handle:
    """Register a loaded kernel for the product whose launches return these statuses."""
    handle, selected = (
        Handle(*statuses),
        launch.decision(launch.gemm_problem(PRODUCT), CPU),
    )
    assert selected.config is not None
    unit = codegen.unit_of(selected.config)
    kernel_registry._had[unit] = Library(unit, Path(), handle)  # type: ignore[arg-type]
    return handle


def call() -> torch.Tensor:
    return launch.gemm(PRODUCT)


def test_a_kernel_that_cannot_be_started_is_switched_off_and_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_registry, "_stored", lambda unit: False)
    builds(monkeypatch, {})
    handle = loaded(1, 1, 1, 1)
    kernel_registry.prepare_graph([])
    with pytest.warns(
        PlanWarning, match="gemm_sm_80_int8_int8_fp32.* failed and is disabled .*invalid argument"
    ):
        result = call()
    want = reference_result.gemm(PRODUCT)
    assert torch.equal(result, want) and handle.runs == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(), want)
    assert handle.runs == 2, "a disabled kernel is not launched again"


def test_earlier_cuda_error_is_not_attributed_to_the_kernel() -> None:
    """Fail the first launch, as CUDA does after an unread earlier error, but not the second."""
    handle = loaded(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        call()
    assert handle.runs == 3 and not kernel_registry.refusals()


def test_a_site_is_made_once_and_arguments_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the kernel is selected once per call site; a call with scales is another site."""
    handle = loaded()
    problems: list[object] = []
    decide = launch.decision
    monkeypatch.setattr(
        launch,
        "decision",
        lambda problem, device: problems.append(problem) or decide(problem, device),
    )
    for _ in range(3):
        call()
    assert handle.runs == 3 and len(problems) == 1
    scale = torch.ones(())
    launch.gemm(GemmProduct(A, B, scale, scale, None))
    assert len(problems) == 2


def test_unsupported_product_is_refused_next_to_a_cached_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check operands once per call site, whose cache key contains every checked property."""
    loaded()
    checked: list[object] = []

    def refuses(*arguments: Any) -> None:
        checked.append(arguments)
        check_given(*arguments)

    check_given = gemm._check_gemm
    monkeypatch.setattr(gemm, "_check_gemm", refuses)
    scale, bias = torch.ones(()), torch.ones(B.shape[1])
    right = A, B, scale, scale, bias, torch.float32, False
    for _ in range(2):
        gemm._gemm_kernel(*right)
    assert len(checked) == 1
    wrong = (
        {2: scale.double()}, {3: torch.ones(1, B.shape[1], dtype=torch.float64)},
        {3: torch.ones(1, 3)}, {4: torch.ones(3)},
        {1: B.float()}, {1: B[:-1]}, {5: torch.int32},
    )  # fmt: skip
    for change in wrong:
        with pytest.raises((PrecisionError, RuntimeError)):
            gemm._gemm_kernel(
                *(change.get(index, argument) for index, argument in enumerate(right))  # type: ignore[arg-type]
            )


def quantizer(*statuses: int) -> Handle:
    """Register a loaded quantizer whose launches return these statuses."""
    handle, unit = Handle(*statuses), codegen.quantizer("sm_80", "fp32", "int8")
    kernel_registry._had[unit] = Library(unit, Path(), handle)  # type: ignore[arg-type]
    return handle


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_launch.quantize(x, SEED, 3, precision("int8"), "nearest", ())


def test_quantizer_call_is_cached_per_layout() -> None:
    handle, x = quantizer(), torch.randn(6, 8)
    for _ in range(3):
        quantize(x)
    assert handle.runs == 3 and len(quantize_launch.cached_quantizer_call) == 1
    q, scale = quantize(x.t())
    assert (
        len(quantize_launch.cached_quantizer_call) == 2
        and q.stride() == x.t().stride()
        and scale.shape == ()
    )
    quantize_launch.quantize(x, SEED, 3, precision("int8"), "nearest", [0])
    assert len(quantize_launch.cached_quantizer_call) == 3 and handle.runs == 5


def test_a_quantizer_that_cannot_be_started_is_switched_off_and_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_registry, "_stored", lambda unit: False)
    handle, x = quantizer(0, 1, 1), torch.randn(6, 8)
    quantize(x)
    with pytest.warns(
        PlanWarning, match="quantize_sm_80_fp32_int8 failed and is disabled .*invalid argument"
    ):
        result = quantize(x)
    want = reference.quantize(x, SEED, 3, precision("int8"), "nearest", ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = quantize(x)
    assert handle.runs == 3, "a disabled quantizer is not launched again"
    assert all(
        torch.equal(a, b) and torch.equal(c, b) for a, b, c in zip(result, want, again, strict=True)
    )
