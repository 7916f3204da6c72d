"""Wrapper of the kernels on a GPU: operand layouts, streams, devices, CUDA graphs without
synchronization or compilation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.problem.problem import GemmProduct, gemm_problem
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.operators.gemm.gemm import gemm
from qsync_fx.backend.operators.quantize import quantize
from tests.gpu import kit, models

FORMATS = kit.here("int8", "fp8", "fp16", "bf16", "tf32")
WIDE = "fp16" if kit.lacks("bf16") else "bf16"
SIZES = ((256, 384, 512), (130, 250, 100), (64, 40, 72))
LATE = (128, 128, 256)


def operands(
    fmt: str, size: tuple[int, int, int], device: torch.device = kit.DEVICE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a, b (contiguous along k), a's scales and the bias."""
    m, n, k = size
    a, b = kit.whole_numbers(fmt, (m, k), device), kit.whole_numbers(fmt, (n, k), device).t()
    return a, b, torch.rand(m, 1, device=device) + 0.5, torch.randn(n, device=device)


def pairs(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return both operands unchanged, and with each of them in other layouts."""
    return [(a, b), *((other, b) for other in layouts(a)), *((a, other) for other in layouts(b))]


def asked() -> list[Problem]:
    """Return the problems of these tests, to compile their kernels in advance."""
    problems = []
    for fmt in FORMATS:
        for size in (*SIZES, LATE):
            a, b, scale, bias = operands(fmt, size, torch.device("cpu"))
            problems += [problem(fmt, *pair, scale, bias) for pair in pairs(a, b)]
    return list(dict.fromkeys(problems))


def call(fmt: str, a: Tensor, b: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return gemm(a, b, scale, None, bias, torch.float32, fmt == "tf32")


def problem(fmt: str, a: Tensor, b: Tensor, scale: Tensor | None, bias: Tensor | None) -> Problem:
    return gemm_problem(GemmProduct(a, b, scale, None, bias, torch.float32, fmt == "tf32"))


def assert_right(
    result: Tensor, fmt: str, a: Tensor, b: Tensor, scale: Tensor | None, bias: Tensor | None
) -> None:
    arguments = [None if t is None else t.cpu() for t in (a, b, scale, bias)]
    want = call(fmt, *arguments)  # type: ignore[arg-type]
    assert result.is_contiguous()
    assert torch.allclose(result.cpu(), want, rtol=1e-6, atol=1e-5)


def layouts(t: Tensor) -> list[Tensor]:
    """Return copies in layouts that kernels do not accept directly: shifted by one element, in
    wider rows, transposed, with gaps.
    """
    rows, columns = t.shape
    shifted = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(rows, columns)
    wider = torch.empty(rows, columns + 3, dtype=t.dtype, device=t.device)[:, 3:]
    transposed = torch.empty(columns, rows, dtype=t.dtype, device=t.device).t()
    sparse = torch.empty(2 * rows, 2 * columns, dtype=t.dtype, device=t.device)[::2, ::2]
    return [made.copy_(t) for made in (shifted, wider, transposed, sparse)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_operands_as_they_come(fmt: str, size: tuple[int, int, int], tmp_path: Path) -> None:
    a, b, scale, bias = operands(fmt, size)
    operand_pairs = pairs(a, b)
    with models.kernels_win(
        [problem(fmt, *pair, scale, bias) for pair in operand_pairs], kit.arch(), tmp_path
    ):
        for pair in operand_pairs:
            assert_right(call(fmt, *pair, scale, bias), fmt, *pair, scale, bias)
        assert_right(call(fmt, a, b, None, None), fmt, a, b, None, None)
    # A row broadcast to many rows, with stride zero.
    assert_right(
        call(fmt, a[:1].expand(9, -1), b, None, bias), fmt, a[:1].expand(9, -1), b, None, bias
    )


def test_kernels_do_compute_where_they_should(tmp_path: Path) -> None:
    """Otherwise the tests above would test torch."""
    for fmt in FORMATS:
        arguments = operands(fmt, SIZES[0])
        launch_utils.forget()
        with models.kernels_win([problem(fmt, *arguments)], kit.arch(), tmp_path / fmt):
            call(fmt, *arguments)
        assert launch_utils.reasons() == {}, fmt


@pytest.mark.parametrize("fmt", FORMATS)
def test_custom_stream(fmt: str, tmp_path: Path) -> None:
    """Kernels wait for preceding work on the current stream: a slow copy of their operands."""
    a, b, scale, bias = operands(fmt, SIZES[0])
    with models.kernels_win([problem(fmt, a, b, scale, bias)], kit.arch(), tmp_path):
        call(fmt, a, b, scale, bias)
        side = torch.cuda.Stream()
        late_a, late_b = torch.zeros_like(a), torch.zeros_like(b)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            late_a.copy_(a)
            late_b.copy_(b)
            result = call(fmt, late_a, late_b, scale, bias)
        torch.cuda.current_stream().wait_stream(side)
        assert_right(result, fmt, a, b, scale, bias)


def test_quantizer_on_a_custom_stream() -> None:
    x, seed = (
        torch.randn(512, 512, device=kit.DEVICE),
        torch.zeros(1, dtype=torch.int64, device=kit.DEVICE),
    )
    want, want_scale = quantize(x, seed, 0, "int8", "stochastic", ())
    late, side = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        q, scale = quantize(late, seed, 0, "int8", "stochastic", ())
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(q, want) and torch.equal(scale, want_scale)


@pytest.mark.parametrize("fmt", FORMATS)
def test_captured_in_a_cuda_graph(fmt: str, tmp_path: Path) -> None:
    """Capture neither compiles a kernel nor synchronizes; a replay reads current operands."""
    a, b, scale, bias = operands(fmt, SIZES[1])
    with models.kernels_win([problem(fmt, a, b, scale, bias)], kit.arch(), tmp_path):
        call(fmt, a, b, scale, bias)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(fmt, a, b, scale, bias)
        for _ in range(2):
            a.copy_(kit.whole_numbers(fmt, a.shape, kit.DEVICE))
            graph.replay()
            assert_right(result, fmt, a, b, scale, bias)


def test_a_kernel_that_is_not_loaded_is_not_compiled_while_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_registry

    arguments = operands(WIDE, LATE)
    with models.kernels_win([problem(WIDE, *arguments)], kit.arch(), tmp_path):
        monkeypatch.setattr(kernel_registry, "_had", {})
        monkeypatch.setattr(
            kernel_registry, "prepare", lambda units: pytest.fail("it was compiled")
        )
        arguments[0] @ arguments[1]  # creates cuBLAS's handle before capture
        torch.ops.aten.mm.dtype(arguments[0], arguments[1], torch.float32)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(WIDE, *arguments)
        graph.replay()
        assert torch.allclose(
            result.cpu(), call(WIDE, *(t.cpu() for t in arguments)), rtol=1e-5, atol=1e-4
        )
    assert any("before CUDA graph capture began" in why for why in launch_utils.reasons().values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here: this needs two")
@pytest.mark.parametrize("fmt", FORMATS)
def test_tensors_on_a_device_other_than_the_current_one(fmt: str) -> None:
    a, b, scale, bias = (t.to("cuda:1") for t in operands(fmt, SIZES[0]))
    with torch.cuda.device(0):
        result = call(fmt, a, b, scale, bias)
        q, _ = quantize(
            bias[None], torch.zeros(1, dtype=torch.int64, device="cuda:1"), 0, "int8", "nearest", ()
        )
    assert result.device == q.device == torch.device("cuda:1")
    assert_right(result, fmt, a, b, scale, bias)


def test_explain_names_the_kernels(tmp_path: Path) -> None:
    from qsync_fx.diagnostics import explain

    model = torch.nn.Sequential(
        torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 64)
    ).to(kit.DEVICE)
    x = torch.randn(4096, 4096, device=kit.DEVICE)
    with models.kernels_win([], kit.arch(), tmp_path):
        reasons = {
            precision: [
                op.reason
                for op in explain(
                    model, x, options={"precision": precision, "skip_unprofitable": False}
                ).operators
            ]
            for precision in ("int8", "int8_grad")
        }
    assert any(f"CUTLASS {kit.arch()} kernels for output" in reason for reason in reasons["int8"])
    # With INT8 gradients, the first layer has two products, since its input needs no gradient; both
    # are INT8.
    assert any(
        f"CUTLASS {kit.arch()} kernels for output, weight gradient" in reason
        for reason in reasons["int8_grad"]
    )
