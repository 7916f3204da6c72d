"""Attribution of the times of wrapper lines to operators: complete and without double counting."""

from __future__ import annotations

import math

import pytest

from qsync_fx.profiler.timing.inductor_lines import (
    Files,
    InductorKernel,
    KernelOutput,
    attribute,
)

FILE, OTHER = "forward.py", "backward.py"


def node(
    owner: str | None, nbytes: int = 8, quantizes: tuple[str, str, int] | None = None
) -> KernelOutput:
    return KernelOutput(owner, "aten.op.default", nbytes, quantizes)


def library(*nodes: KernelOutput) -> InductorKernel:
    return InductorKernel("extern_kernels.mm", True, nodes)


def fused(*nodes: KernelOutput) -> InductorKernel:
    return InductorKernel("cpp_fused_0", False, nodes)


def files(
    lines: dict[int, InductorKernel], backward: dict[int, InductorKernel] | None = None
) -> Files:
    return {FILE: lines, OTHER: backward or {}}


def test_library_call_is_attributed_to_its_operator() -> None:
    kernels = files({10: library(node("a/linear"))}, {10: library(node("a/linear"))})
    result = attribute({(FILE, 10, False): 3.0, (OTHER, 10, True): 5.0}, kernels)
    assert (
        result.operators == {"a/linear": (3.0, 5.0)}
        and result.nobody == (0, 0)
        and not result.quantized
    )


def test_fused_kernel_is_attributed_by_bytes_moved() -> None:
    kernel = fused(
        node("a/relu", 30), node("b/layer_norm", 50), node("b/layer_norm", 20), node(None, 900)
    )
    result = attribute({(FILE, 10, False): 2.0}, files({10: kernel}))
    assert result.operators["a/relu"][0] == pytest.approx(0.6) and result.operators["b/layer_norm"][
        0
    ] == pytest.approx(1.4)
    only_views = fused(node("a/view", 0), node("b/view", 0))
    assert attribute({(FILE, 10, False): 2.0}, files({10: only_views})).operators == {
        "a/view": (1, 0),
        "b/view": (1, 0),
    }


def test_lines_without_a_call_count_to_the_adjacent_kernel() -> None:
    kernels = files({12: library(node("a/linear")), 15: library(node("b/linear"))})
    seconds = {
        (FILE, line, False): duration
        for line, duration in ((10, 0.25), (12, 1.0), (13, 0.5), (15, 2.0), (16, 4.0))
    }
    assert attribute(seconds, kernels).operators == {"a/linear": (1.75, 0), "b/linear": (6.0, 0)}


def test_quantizers_are_reported_individually() -> None:
    call = library(node("a/linear", 8, ("fp32", "int8", 64)))
    kernels = files({10: call, 12: library(node("a/linear"))}, {9: call})
    result = attribute(
        {(FILE, 10, False): 1.0, (FILE, 12, False): 2.0, (OTHER, 9, True): 4.0}, kernels
    )
    assert result.operators == {"a/linear": (2.0, 0)}
    assert [
        (q.operator, q.before, q.after, q.numel, q.backward, q.seconds) for q in result.quantized
    ] == [
        ("a/linear", "fp32", "int8", 64, False, 1.0),
        ("a/linear", "fp32", "int8", 64, True, 4.0),
    ]


def test_fused_producer_is_not_a_quantizer() -> None:
    kernels = files(
        {10: fused(node("a/linear", 8, ("fp32", "int8", 64))), 12: library(node("a/linear"))}
    )
    result = attribute({(FILE, 10, False): 1.0, (FILE, 12, False): 2.0}, kernels)
    assert result.operators == {"a/linear": (3.0, 0)} and not result.quantized


def test_all_of_it_adds_up() -> None:
    lines = {
        3: fused(node(None)),
        5: fused(node("a/relu", 3), node("b/gelu", 7)),
        8: library(node("c/linear", 8, ("bf16", "int8", 4))),
    }
    seconds = {(FILE, line, False): 0.1 * line for line in range(1, 12)} | {(OTHER, 4, True): 7.0}
    result = attribute(seconds, files(lines))
    parts = [
        *(t for both in result.operators.values() for t in both),
        *(q.seconds for q in result.quantized),
        *result.nobody,
    ]
    assert math.isclose(sum(parts), sum(seconds.values()))
    assert result.nobody[1] == 7.0
