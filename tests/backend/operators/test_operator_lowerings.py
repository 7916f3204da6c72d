"""Lowerings of ATen operators with scaled formats to qsync operators with equal results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from qsync_fx.backend.operators import Operands, lowerings
from qsync_fx.backend.operators.quantize import dequantize, quantize
from qsync_fx.ops import Kind, row_for, table

SEED = torch.tensor([3])


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, fx.Node]:
    """Return the pre-dispatch graph with fake values, and its only operator with scaled formats."""
    module = make_fx(function, pre_dispatch=True, tracing_mode="fake")(*inputs)
    (operator_node,) = [
        node
        for node in module.graph.nodes
        if (row := row_for(node.target)) is not None and row.scaled
    ]
    return module, operator_node


def lowered(module: fx.GraphModule, node: fx.Node, keep: dict[str, list[int]]) -> str | None:
    """Lower the node with INT8 operands; return the reason if that is impossible."""
    row, graph = row_for(node.target), module.graph
    assert row is not None
    if (refused := lowerings()[row.name].refuses(node)) is not None:
        return refused
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    operands: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    with graph.inserting_before(node):
        seed = graph.call_function(torch.ops.aten.full.default, ([1], 3), {"dtype": torch.int64})
        for stream, (index, role) in enumerate(
            zip(row.scaled, ("activation", "weight"), strict=True)
        ):
            operand: Any = node.args[index] if index < len(node.args) else node.kwargs[names[index]]
            pair = graph.call_function(
                torch.ops.qsync.quantize.default,
                (operand, seed, stream, "int8", "nearest", keep[role]),
            )
            values = quantize(
                torch.empty(operand.meta["val"].shape), SEED, 0, "int8", "nearest", keep[role]
            )
            parts = [graph.call_function(operator.getitem, (pair, index)) for index in range(2)]
            for part, value in zip(parts, values, strict=True):
                part.meta["val"] = value.to("meta")
            operands.append((operand, parts[0], parts[1]))
        new = lowerings()[row.name].emit(
            node, Operands((operands[0], operands[1]), seed, 9, "int8", "nearest", torch.float32)
        )
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.lint()
    module.recompile()
    return None


def weights(*shape: int) -> Tensor:
    return torch.randn(shape)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], list[int], list[int]]] = {
    # name: function, inputs (activation, weight, others), dimensions with scales of activation and
    # weight
    "linear": (F.linear, (weights(2, 3, 6), weights(4, 6), weights(4)), [0, 1], [0]),
    "linear without bias": (F.linear, (weights(5, 6), weights(4, 6)), [0], [0]),
    "linear of a vector": (F.linear, (weights(6), weights(4, 6), weights(4)), [], [0]),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x, w),
        (weights(5, 6), weights(6, 4), weights(4)),
        [0],
        [1],
    ),
    "conv1d": (F.conv1d, (weights(2, 3, 7), weights(4, 3, 3), weights(4)), [0], [0]),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, None, (2, 1), 1, (1, 2), 2),
        (weights(2, 4, 7, 6), weights(6, 2, 3, 2)),
        [0],
        [0],
    ),
    "conv2d by name": (
        lambda x, w, b: torch.ops.aten.conv2d.default(
            input=x, weight=w, bias=b, padding=[1], stride=[2]
        ),
        (weights(2, 3, 7, 6), weights(4, 3, 3, 3), weights(4)),
        [0],
        [0],
    ),
    "conv2d of one image": (F.conv2d, (weights(3, 7, 6), weights(4, 3, 3, 3), weights(4)), [], [0]),
    "conv2d same": (
        lambda x, w: F.conv2d(x, w, padding="same", dilation=(1, 2)),
        (weights(2, 3, 7, 6), weights(4, 3, 3, 2)),
        [0],
        [0],
    ),
    "conv2d valid": (
        lambda x, w: F.conv2d(x, w, padding="valid", stride=2),
        (weights(2, 3, 7, 6), weights(4, 3, 3, 2)),
        [0],
        [0],
    ),
    "conv3d": (
        lambda x, w: F.conv3d(x, w, stride=2, padding=(1, 0, 1)),
        (weights(2, 3, 5, 4, 5), weights(4, 3, 3, 2, 1)),
        [0],
        [0],
    ),
    "conv_transpose1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1, 1, 2),
        (weights(2, 4, 5), weights(4, 3, 3), weights(3)),
        [0],
        [1],
    ),
    # With groups, no dimension of the weight is the output channels alone.
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 3), 1, (1, 2), 2, 2),
        (weights(2, 4, 5, 4), weights(4, 3, 3, 3), weights(6)),
        [0],
        [],
    ),
    "conv_transpose3d": (
        F.conv_transpose3d,
        (weights(2, 4, 3, 3, 3), weights(4, 3, 2, 2, 2)),
        [0],
        [1],
    ),
    "convolution": (
        lambda x, w: torch.ops.aten.convolution.default(x, w, None, [2], [1], [1], True, [1], 1),
        (weights(2, 4, 5), weights(4, 3, 3)),
        [0],
        [1],
    ),
    "_convolution": (
        lambda x, w: torch.ops.aten._convolution.default(
            x, w, None, [2], [1], [1], False, [0], 2, False, False, True, True
        ),
        (weights(2, 4, 5), weights(6, 2, 3)),
        [0],
        [0],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channel", [False, True])
def test_the_lowered_operator_computes_the_same(case: str, channel: bool) -> None:
    function, inputs, keep_activation, keep_weight = CASES[case]
    module, node = traced(function, *inputs)
    keep: dict[str, list[int]] = {"activation": [], "weight": []}
    if channel:
        row = row_for(node.target)
        assert row is not None
        keep = {role: lowerings()[row.name].keep(node, role) for role in ("activation", "weight")}  # type: ignore[arg-type]
        assert keep == {"activation": keep_activation, "weight": keep_weight}
    assert lowered(module, node, keep) is None
    in_int8 = [
        dequantize(*quantize(t, SEED, 0, "int8", "nearest", keep[role]), torch.float32)
        for t, role in zip(inputs, ("activation", "weight"), strict=False)
    ]
    expected = function(*in_int8, *inputs[2:])
    torch.testing.assert_close(module(*inputs), expected, rtol=1e-5, atol=1e-5)
    assert [node.op for node in module.graph.nodes].count("placeholder") == len(inputs)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("function", "inputs", "says"),
    [
        (
            lambda x, w, b: torch.addmm(b, x, w, beta=2),
            (weights(5, 6), weights(6, 4), weights(4)),
            "weighs its bias",
        ),
        (
            lambda x, w, b: torch.addmm(b, x, w, alpha=0.5),
            (weights(5, 6), weights(6, 4), weights(4)),
            "weighs its bias",
        ),
        (
            lambda x, w, b: torch.addmm(b, x, w),
            (weights(5, 6), weights(6, 4), weights(5, 4)),
            "a bias per output channel",
        ),
        (
            lambda x, w, b: torch.addmm(b, x, w),
            (weights(5, 6), weights(6, 4), weights(1)),
            "a bias per output channel",
        ),
        (F.linear, (weights(5, 6), weights(6)), "vector"),
        (
            lambda x, w: F.conv1d(x, w, padding="same"),
            (weights(2, 3, 7), weights(4, 3, 2)),
            "two sides",
        ),
    ],
)
def test_unlowered_operators_have_a_reason(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], says: str
) -> None:
    module, node = traced(function, *inputs)
    before = len(module.graph.nodes)
    reason = lowered(module, node, {"activation": [], "weight": []})
    assert reason is not None
    assert says in reason
    assert len(module.graph.nodes) == before


def test_exactly_scaled_operators_have_a_lowering() -> None:
    scaled = {row.name for row in table().values() if row.kind is Kind.ADJUSTABLE and row.may_scale}
    assert scaled == set(lowerings())
