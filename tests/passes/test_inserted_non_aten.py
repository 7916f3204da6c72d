"""Inserted nodes that are not ATen operators, and nodes that cannot be inserted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx.errors import PassError
from qsync_fx.graph import PrecisionGraph
from tests.support.compiling.inserting import Net, Put, behind, explain, put_in, relu


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("after", ["normalize", "classify", "lower"])
@pytest.mark.parametrize("spelling", ["function", "method", "module", "lambda"])
def test_torch_is_spelled_as_the_model_is(spelling: str, after: str) -> None:
    scale = Scale()

    def put(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
        if spelling == "function":
            return graph.graph.call_function(F.relu, (node,))
        if spelling == "method":
            return graph.graph.call_method("relu", (node,))
        if spelling == "lambda":
            return graph.graph.call_function(lambda x: torch.relu(x) + 0.0, (node,))
        graph.module.add_submodule("scale", scale)
        return graph.graph.call_module("scale", (node,))

    step = behind("body/linear", put, after)
    names = {
        "function": ["relu"],
        "method": ["relu"],
        "lambda": ["relu", "add"],
        "module": ["mul"],
    }[spelling]
    assert list(put_in(explain(step, precision="fp32"))) == [f"body/tap.{name}" for name in names]
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 8)
    run = torch.compile(
        model,
        backend="qsync",
        options={"precision": "fp32", "inner_backend": "aot_eager", "passes": [step]},
    )
    y = model.body(x)
    torch.testing.assert_close(
        run(x), model.classifier(torch.tanh(scale(y) if spelling == "module" else torch.relu(y)))
    )
    run(x).sum().backward()
    assert (scale.factor.grad is not None) is (spelling == "module")


def too_small(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
    other = next(
        used for used in graph.nodes if used.op == "placeholder" and "classifier_bias" in used.name
    )
    return graph.graph.call_function(torch.ops.aten.add.Tensor, (node, other))


def unknown_module(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
    return graph.graph.create_node("call_module", "nowhere", (node,))


def unknown_attribute(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
    attribute = graph.graph.create_node("get_attr", "nowhere")
    return graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, attribute))


def no_tensor(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
    return graph.graph.call_function(lambda x: open(x), (node,))


@pytest.mark.parametrize("after", ["normalize", "assign", "lower"])
@pytest.mark.parametrize(
    ("put", "says"),
    [
        (too_small, "aten.add.Tensor does not take"),
        (unknown_module, "has no attribute 'nowhere'"),
        (unknown_attribute, "has no attribute 'nowhere'"),
        (no_tensor, "cannot be traced"),
    ],
)
def test_insertion_without_computation_is_an_error(put: Put, says: str, after: str) -> None:
    with pytest.raises(PassError) as caught:
        explain(behind("body/linear", put, after))
    assert says in str(caught.value)
    assert "tap" in str(caught.value)
    assert caught.value.where and "node %" in caught.value.where
    assert caught.value.do


def test_quantized_placeholders_are_limited_to_products() -> None:
    """`qsync::dequantize` has no gradient, and `lower` removes it: another reader would not
    train.
    """

    def run(graph: PrecisionGraph) -> None:
        op = graph.operators(kind="adjustable")[1]
        operand = op.node.args[0]
        assert isinstance(operand, fx.Node)
        with graph.graph.inserting_before(op.node):
            op.node.replace_input_with(operand, relu(graph, operand))

    with pytest.raises(PassError, match="which represents a quantized operand and has no gradient"):
        explain(qsync_fx.graph_pass(after="insert_casts")(run), precision="int8")
