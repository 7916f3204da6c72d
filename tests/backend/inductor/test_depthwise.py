"""Gradients of depthwise convolutions in BF16 that a CPU computes in FP32, where oneDNN has no fast kernel for BF16."""

from __future__ import annotations

from typing import Any

import pytest
import tiers
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from qsync_fx.backend.inductor.decompositions import for_inductor

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
BACKWARD = torch.ops.aten.convolution_backward.default


def operands(kernel: int, groups: int, stride: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """Gradient, input and weight of a convolution of eight channels, and its geometry."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 12, 12).to(dtype), torch.randn(8, 8 // groups, kernel, kernel).to(dtype)
    rest = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups
    gradient = torch.randn_like(torch.ops.aten.convolution.default(x, weight, None, *rest))
    return gradient, x, weight, [8], *rest


def computed(arguments: tuple[Any, ...], needed: list[bool]) -> tuple[list[tuple[torch.dtype, list[bool]]], Any]:
    """What calls the gradients are decomposed to, by type and by what they give, and the gradients."""

    def run(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        return BACKWARD(gradient, x, weight, *arguments[3:], needed)

    graph = make_fx(run, decomposition_table=for_inductor(CPU))(*arguments[:3])
    calls = graph.graph.find_nodes(op="call_function", target=BACKWARD)
    return [(call.args[0].meta["val"].dtype, list(call.args[-1])) for call in calls], graph(*arguments[:3])


@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "expected"),
    [
        (3, 1, 8, [(BF16, [True, True, True])]),
        (3, 2, 8, [(FP32, [True, False, False]), (BF16, [False, True, True])]),
        (5, 1, 8, [(FP32, [False, True, False]), (BF16, [True, False, True])]),
        (7, 2, 8, [(FP32, [True, True, False]), (BF16, [False, False, True])]),
        (7, 2, 4, [(BF16, [True, True, True])]),
        (7, 2, 1, [(BF16, [True, True, True])]),
    ],
)
def test_slow_ones_are_computed_in_fp32(
    kernel: int, stride: int, groups: int, expected: list[tuple[torch.dtype, list[bool]]]
) -> None:
    arguments = operands(kernel, groups, stride)
    calls, found = computed(arguments, [True, True, True])
    assert calls == expected
    in_bf16 = BACKWARD(*arguments, [True, True, True])
    exact = BACKWARD(*(t.double() for t in arguments[:3]), *arguments[3:], [True, True, True])
    for one, other, reference in zip(found, in_bf16, exact, strict=True):
        assert one.dtype is BF16 and one.shape == reference.shape
        errors = [float((t - reference).norm() / reference.norm()) for t in (one, other)]
        assert errors[0] <= errors[1] * 1.05 and errors[0] < 0.01


def test_what_nobody_needs_is_not_computed() -> None:
    arguments = operands(3, 8, 2)
    calls, found = computed(arguments, [False, True, False])
    assert calls == [(BF16, [False, True, False])] and found[0] is None
    calls, found = computed(arguments, [True, False, False])
    assert calls == [(FP32, [True, False, False])] and found[1] is found[2] is None


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_other_types_stay(dtype: torch.dtype) -> None:
    calls, _ = computed(operands(7, 8, 2, dtype), [True, True, False])
    assert calls == [(dtype, [True, True, False])]


@tiers.ALL
def test_a_model_trains_with_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8))
    x = torch.randn(2, 3, 12, 12)
    found = []
    for precision in ("fp32", "bf16"):
        model.zero_grad()
        torch.compile(model, backend="qsync", options={"precision": precision})(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert float((one - other).norm() / one.norm()) < 0.02
