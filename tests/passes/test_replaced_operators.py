"""Operators that a custom pass replaces, by itself or as a rewrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

import qsync_fx
from qsync_fx.graph import PrecisionGraph
from qsync_fx.plan import Plan
from tests.support.compiling.inserting import PLACES, Net, behind, explain, put_in, trained

# Replacements and copies.


@pytest.mark.parametrize("after", ["normalize", "classify", "assign", "cascade", "insert_casts"])
def test_replacement_with_an_equal_name_is_the_same_operator(after: str) -> None:
    def twice(graph: PrecisionGraph) -> None:
        for op in graph.operators(kind="adjustable"):
            x, weight, bias = op.node.args
            with graph.graph.inserting_before(op.node):
                new = graph.graph.call_function(op.node.target, (x, weight, bias))
            op.node.replace_all_uses_with(new)
            graph.graph.erase_node(op.node)

    plan = Plan("fp32", patterns=[("classifier", "int8")])
    explanation = explain(qsync_fx.graph_pass(after=after)(twice), plan=plan)
    products = {str(op.id): op for op in explanation.operators if op.kind == "adjustable"}
    assert {name: str(op.precision) for name, op in products.items()} == {
        "body/linear": "fp32", "classifier/linear": "int8",
    }  # fmt: skip
    assert all(op.reason.startswith("inserted by twice; plan: ") for op in products.values())
    assert explanation.graph().count("qsync.linear") == 1


def test_copy_of_an_operator_is_distinct() -> None:
    def again(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
        copy = graph.graph.node_copy(node)
        return graph.graph.call_function(torch.ops.aten.add.Tensor, (node, copy))

    for after in PLACES[:5]:
        inserted = put_in(explain(behind("body/linear", again, after), precision="bf16"))
        assert list(inserted) == ["body/tap.linear", "body/tap.add"]


# Rewrites.


def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight, bias))


def rewriting(after: str) -> Any:
    def put(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return y * torch.rsqrt(1 + y * y)

    return qsync_fx.rewrite(after=after, name="soft")(scaled).replacement(put)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("after", PLACES[:5])
def test_a_rewrite_runs_at_any_place(after: str, precision: str) -> None:
    step = rewriting(after)
    explanation = explain(step, precision=precision)
    assert explanation.rewritten["soft"].count == 1
    assert list(put_in(explanation)) == [
        "body/linear",
        "body/soft.mul",
        "body/soft.add",
        "body/soft.rsqrt",
        "body/soft.mul#1",
    ]
    product = put_in(explanation)["body/linear"]
    assert (product.kind, str(product.precision)) == ("adjustable", precision)
    assert product.reason == f"rewritten by soft; plan: uniform {precision}"
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    y = model.body(x)
    expected = model.classifier(y * torch.rsqrt(1 + y * y))
    run = torch.compile(
        model,
        backend="qsync",
        options={"precision": precision, "inner_backend": "aot_eager", "passes": [step]},
    )
    actual, grads = trained(model, x, run)
    torch.testing.assert_close(
        actual, expected.detach(), rtol=0.1, atol=1e-6 if precision == "fp32" else 0.1
    )
    assert grads.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("after", PLACES[5:])
def test_rewrite_after_casts_matches_cast_nodes(after: str, precision: str) -> None:
    explanation = explain(rewriting(after), precision=precision)
    assert explanation.rewritten["soft"].count == 1
    kinds = {name: (op.kind, str(op.precision)) for name, op in put_in(explanation).items()}
    assert kinds["body/linear"] == ("adjustable", precision)
    assert kinds["body/soft.mul"] == ("fixed", precision)
