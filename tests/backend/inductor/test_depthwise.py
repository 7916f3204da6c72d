"""Gradients of BF16 depthwise convolutions, computed in FP32 if oneDNN has no fast BF16 kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from qsync_fx.backend.inductor.decompositions import for_inductor
from qsync_fx.backend.operators.products_in_fp32 import IN_FP32
from tests.support import tiers

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
BACKWARD = torch.ops.aten.convolution_backward.default
CHECKS = ("test_schema", "test_faketensor")


def operands(kernel: int, groups: int, stride: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """Return gradient, input, weight and geometry of a convolution of eight channels."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(2, 8, 12, 12).to(dtype),
        torch.randn(8, 8 // groups, kernel, kernel).to(dtype),
    )
    rest = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups
    gradient = torch.randn_like(torch.ops.aten.convolution.default(x, weight, None, *rest))
    return gradient, x, weight, [8], *rest


def computed(arguments: tuple[Any, ...], needed: list[bool]) -> tuple[list[bool], list[bool], Any]:
    """Return the output masks of our operator and of torch's, empty without a call, and the
    gradients.
    """

    def run(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        return BACKWARD(gradient, x, weight, *arguments[3:], needed)

    graph = make_fx(run, decomposition_table=for_inductor(CPU))(*arguments[:3])
    masks = []
    for targets in ((torch.ops.qsync.depthwise_gradients.default,), (BACKWARD, IN_FP32[BACKWARD])):
        calls = [node for node in graph.graph.nodes if node.target in targets]
        assert len(calls) <= 1
        masks.append([bool(wanted) for call in calls for wanted in call.args[-1]])
    return masks[0], masks[1], graph(*arguments[:3])


@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "ours", "torchs"),
    [
        (3, 1, 8, [], [True, True, True]),
        (3, 2, 8, [True, False], [False, True, True]),
        # The bias gradient is a sum: torch's kernel would also compute the weight gradient.
        (5, 1, 8, [False, True], [True, False, False]),
        (7, 2, 8, [True, True], []),
        (7, 2, 4, [], [True, True, True]),
        (7, 2, 1, [], [True, True, True]),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_slow_depthwise_convolutions_run_in_fp32(
    kernel: int, stride: int, groups: int, ours: list[bool], torchs: list[bool], channels_last: bool
) -> None:
    arguments = operands(kernel, groups, stride)
    if channels_last:
        arguments = (
            *(t.to(memory_format=torch.channels_last) for t in arguments[:2]),
            *arguments[2:],
        )
    our_mask, torch_mask, gradients = computed(arguments, [True, True, True])
    assert (our_mask, torch_mask) == (ours, torchs)
    in_bf16 = BACKWARD(*arguments, [True, True, True])
    exact = BACKWARD(*(t.double() for t in arguments[:3]), *arguments[3:], [True, True, True])
    for actual, bf16, reference in zip(gradients, in_bf16, exact, strict=True):
        assert actual.dtype is BF16 and actual.shape == reference.shape
        errors = [float((t - reference).norm() / reference.norm()) for t in (actual, bf16)]
        assert errors[0] <= errors[1] * 1.05 and errors[0] < 0.01


def test_large_kernels_are_so_in_fp32_too() -> None:
    arguments = operands(7, 8, 2, FP32)
    ours, torchs, gradients = computed(arguments, [True, True, True])
    assert (ours, torchs) == ([False, True], [True, False, False])
    for actual, expected in zip(gradients, BACKWARD(*arguments, [True, True, True]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_unused_gradients_are_not_computed() -> None:
    arguments = operands(3, 8, 2)
    ours, torchs, gradients = computed(arguments, [False, True, False])
    assert (ours, torchs) == ([], [False, True, False]) and gradients[0] is None
    ours, torchs, gradients = computed(arguments, [True, False, False])
    assert (ours, torchs) == ([True, False], []) and gradients[1] is gradients[2] is None
    ours, torchs, gradients = computed(operands(5, 8, 1), [False, False, True])
    assert (ours, torchs) == ([], [False, False, True])


@pytest.mark.parametrize("needed", [[True, False], [False, True], [True, True]])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_operator(needed: list[bool], dtype: torch.dtype) -> None:
    gradient, x, weight, _, stride, padding, dilation, *_ = operands(5, 8, 2, dtype)
    arguments = gradient, x, weight, stride, padding, dilation, needed
    torch.library.opcheck(torch.ops.qsync.depthwise_gradients.default, arguments, test_utils=CHECKS)


def test_other_types_stay() -> None:
    ours, torchs, _ = computed(operands(7, 8, 2, torch.float64), [True, True, False])
    assert (ours, torchs) == ([], [True, True, False])


@tiers.ALL
def test_a_model_trains_with_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8))
    x = torch.randn(2, 3, 12, 12)
    gradients = []
    for precision in ("fp32", "bf16"):
        model.zero_grad()
        torch.compile(model, backend="qsync", options={"precision": precision})(
            x
        ).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for fp32, bf16 in zip(*gradients, strict=True):
        assert fp32 is not None and bf16 is not None
        assert float((fp32 - bf16).norm() / fp32.norm()) < 0.02
