"""Nodes that a custom pass inserts into a graph: id, kind, reason, source line and cost, and their
training.
"""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.graph import PrecisionGraph
from qsync_fx.plan import Plan
from tests.support import tiers
from tests.support.compiling.inserting import PLACES, Net, behind, explain, put_in, relu, trained

# Operators inserted by `graph.call_function` alone, without a value.


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("after", PLACES)
def test_an_operator_has_its_place_wherever_it_was_put_in(after: str, precision: str) -> None:
    step = behind("body/linear", relu, after)
    explanation = explain(step, precision=precision)
    (inserted,) = put_in(explanation).values()
    assert str(inserted.id) == "body/tap.relu"
    assert inserted.reason.startswith("inserted by tap; ")
    assert inserted.source is not None
    assert "self.body(x)" in inserted.source.code
    assert inserted.precision is inserted.output is not None
    assert str(inserted.precision) == "bf16"
    assert inserted.kind == ("fixed" if after in PLACES[5:] else "dependent")
    assert inserted.note.cost is not None
    assert inserted.note.cost.bytes > 0
    others = [str(op.id) for op in explanation.operators if op is not inserted and not op.note.by]
    assert others == [str(op.id) for op in explain(precision=precision).operators]

    class Written(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(torch.tanh(torch.relu(self.body(x))))

    torch.manual_seed(0)
    model, x = Written(), torch.randn(2, 8)
    compiled: dict[str, Any] = {"precision": precision, "inner_backend": "aot_eager"}
    torch.manual_seed(1)
    expected = trained(model, x, torch.compile(model, backend="qsync", options=compiled))
    plain = Net()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    actual = trained(
        plain, x, torch.compile(plain, backend="qsync", options={**compiled, "passes": [step]})
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_before_normalize_too() -> None:
    """That graph is as Dynamo creates it: functions of torch without ids."""

    @qsync_fx.graph_pass(before="normalize")
    def early(graph: PrecisionGraph) -> None:
        tanh = next(node for node in graph.nodes if "tanh" in str(node.target))
        with graph.graph.inserting_before(tanh):
            new = graph.graph.call_function(torch.tanh, (tanh.args[0],))
        tanh.replace_input_with(new.args[0], new)

    explanation = explain(early, precision="bf16")
    assert [str(op.id) for op in explanation.operators] == [
        "body/linear",
        "/early.tanh@body",
        "/tanh@body",
        "classifier/linear",
    ]
    assert put_in(explanation)["/early.tanh@body"].reason.startswith("inserted by early; ")


def test_reports_show_inserted_nodes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    step = behind("body/linear", relu, "lower")
    explanation = explain(step, precision="bf16")
    (row,) = (line for line in str(explanation).splitlines() if "tap.relu" in line)
    assert "body/tap.relu" in row
    assert "inserted by tap; it was inserted after 'insert_casts'" in row
    assert "inserting.py:" in row
    from qsync_fx.cli.commands.inspect import operator_as_json

    (record,) = (operator_as_json(op) for op in explanation.operators if op.note.by)
    record = json.loads(json.dumps(record))
    assert record["id"] == "body/tap.relu"
    assert record["reason"].startswith("inserted by tap; ")
    explanation.save_dot(tmp_path / "net.dot")
    assert "body/tap.relu" in (tmp_path / "net.dot").read_text()
    assert "inserted by tap" in (tmp_path / "net.dot").read_text()


def test_compiled_graph_shows_inserted_nodes() -> None:
    torch.manual_seed(0)
    model = Net()
    options = {
        "precision": "bf16",
        "inner_backend": "aot_eager",
        "passes": [behind("body/linear", relu)],
    }
    trained(model, torch.randn(2, 8), torch.compile(model, backend="qsync", options=options))
    (ran,) = (
        ran for ran in qsync_fx.plan_coverage(model).operators if ran.id.operator == "tap.relu"
    )
    assert ran.reason.startswith("inserted by tap; ")
    assert "inserted by tap" in str(qsync_fx.plan_coverage(model))


# Adjustable operators.


def with_adapter(
    weight: nn.Parameter, after: str, where: str = "body/linear"
) -> qsync_fx.GraphPass:
    def adapter(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
        graph.module.register_parameter("adapter", weight)
        parameter = graph.graph.get_attr("adapter")
        product = graph.graph.call_function(torch.ops.aten.linear.default, (node, parameter))
        return graph.graph.call_function(torch.ops.aten.add.Tensor, (node, product))

    return behind(where, adapter, after, "adapter")


@pytest.mark.parametrize(
    ("after", "inner_backend"),
    [
        ("normalize", "aot_eager"),
        pytest.param("normalize", "inductor", marks=tiers.ALL),
        ("classify", "aot_eager"),
        ("assign", "aot_eager"),
        ("insert_casts", "aot_eager"),
        ("lower", "aot_eager"),
        pytest.param("lower", "inductor", marks=tiers.ALL),
    ],
)
def test_product_with_a_parameter_of_the_pass_trains(after: str, inner_backend: str) -> None:
    torch.manual_seed(0)
    model, weight, x = Net(), nn.Parameter(torch.randn(8, 8) / 3), torch.randn(4, 8)
    step = with_adapter(weight, after)
    explanation = explain(step, model=model, precision="fp32")
    assert list(put_in(explanation)) == ["body/adapter.linear", "body/adapter.add"]
    y = model.body(x)
    expected = model.classifier(torch.tanh(y + F.linear(y, weight)))
    gradients = torch.autograd.grad(expected.square().sum(), [weight, model.body.weight])
    run = torch.compile(
        model,
        backend="qsync",
        options={"precision": "fp32", "inner_backend": inner_backend, "passes": [step]},
    )
    actual, _ = trained(model, x, run)
    torch.testing.assert_close(actual, expected.detach())
    assert weight.grad is not None
    torch.testing.assert_close([weight.grad, model.body.weight.grad], list(gradients))


@pytest.mark.parametrize("after", ["normalize", "autocast", "classify"])
def test_plan_applies_to_nodes_inserted_before_it(after: str) -> None:
    step = with_adapter(nn.Parameter(torch.eye(8)), after)
    plan = Plan("fp32", patterns=[("**/adapter.linear", "int8")])
    explanation = explain(step, plan=plan)
    product = put_in(explanation)["body/adapter.linear"]
    assert (product.kind, str(product.precision)) == ("adjustable", "int8")
    assert product.reason.startswith("inserted by adapter; plan: pattern")
    assert "qsync.linear" in explanation.graph()
    # The plan of the explanation is valid for the model with the pass.
    assert explain(step, plan=explanation.plan()).plan().operators == explanation.plan().operators


@pytest.mark.parametrize("after", ["assign", "cascade"])
def test_nodes_inserted_after_the_plan_are_unchanged_with_a_reason(after: str) -> None:
    explanation = explain(with_adapter(nn.Parameter(torch.eye(8)), after), precision="int8")
    product = put_in(explanation)["body/adapter.linear"]
    assert (product.kind, str(product.precision)) == ("fixed", "fp32")
    assert product.reason == (
        "inserted by adapter; it was put in after 'assign' had applied the plan, so it stays in "
        "fp32: let the pass run before for the plan "
        "to decide"
    )


@pytest.mark.parametrize("after", PLACES)
def test_replanning_without_a_trace_decides_equally(after: str) -> None:
    step = with_adapter(nn.Parameter(torch.eye(8)), after)
    explanation = explain(step, behind("classifier/linear", relu, after), precision="bf16")
    plan = Plan("int8")
    again, afresh = (
        explanation.replanned(plan),
        explain(step, behind("classifier/linear", relu, after), plan=plan),
    )

    def told(explained: qsync_fx.Explanation) -> list[tuple[Any, ...]]:
        return [
            (op.id, op.kind, op.precision, op.output, op.reason, op.note.cost)
            for op in explained.operators
        ]

    assert told(again) == told(afresh)


def test_costs_include_nodes_inserted_before_casts() -> None:
    weight = nn.Parameter(torch.eye(8))
    for after in ("normalize", "classify", "cascade", "lower"):
        cost = put_in(explain(with_adapter(weight, after), precision="fp32"))[
            "body/adapter.linear"
        ].note.cost
        assert cost is not None
        assert cost.forward.flops == 2 * 2 * 8 * 8


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = Net(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(checkpoint(self.inner, x, use_reentrant=False))


@pytest.mark.parametrize("after", PLACES)
def test_in_a_checkpointed_region(after: str) -> None:
    torch.manual_seed(0)
    model, weight, x = Checkpointed(), nn.Parameter(torch.randn(8, 8) / 3), torch.randn(4, 8)
    step = with_adapter(weight, after, "inner.body/linear")
    explanation = explain(step, model=model, precision="bf16")
    assert list(put_in(explanation)) == ["inner.body/adapter.linear", "inner.body/adapter.add"]
    y = model.inner.body(x)
    expected = model.top(model.inner.classifier(torch.tanh(y + F.linear(y, weight))))
    (gradient,) = torch.autograd.grad(expected.square().sum(), [weight])
    run = torch.compile(
        model,
        backend="qsync",
        options={"precision": "fp32", "inner_backend": "aot_eager", "passes": [step]},
    )
    actual, _ = trained(model, x, run)
    torch.testing.assert_close(actual, expected.detach())
    torch.testing.assert_close(weight.grad, gradient)


@pytest.mark.parametrize("after", ["normalize", "autocast", "classify", "lower"])
def test_in_a_region_of_autocast(after: str) -> None:
    """An inserted operator is in the autocast region of its neighbours, and a plan overrides the
    region for both.
    """

    class Region(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    for options, runs in (
        ({}, "bf16"),
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "int8"}, "int8"),
    ):
        step = with_adapter(nn.Parameter(torch.eye(8)), "normalize" if after == "lower" else after)
        product = put_in(explain(step, model=Region(), **options))["body/adapter.linear"]
        assert str(product.precision) == runs, product.reason


def test_several_results_and_several_graphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return torch.relu(self.second(x))

    @qsync_fx.graph_pass(after="classify", name="halves")
    def halves(graph: PrecisionGraph) -> None:
        for op in graph.operators(pattern="/relu"):
            users = list(op.node.users)
            with graph.graph.inserting_before(op.node.next):
                pair = graph.graph.call_function(torch.ops.aten.split.Tensor, (op.node, 4, -1))
                parts = [
                    graph.graph.call_function(operator.getitem, (pair, index)) for index in range(2)
                ]
                halves = graph.graph.call_function(torch.chunk, (op.node, 2, -1))
                other = graph.graph.call_function(operator.getitem, (halves, 0))
                joined = graph.graph.call_function(torch.cat, ([parts[1], other], -1))
            for user in users:
                user.replace_input_with(op.node, joined)

    explanation = explain(halves, model=Broken(), precision="bf16")
    assert len(explanation.graphs) == 2
    assert list(put_in(explanation)) == [
        "/halves.split@first", "/halves.chunk@first", "/halves.cat@first",
        "/halves.split@second", "/halves.chunk@second", "/halves.cat@second",
    ]  # fmt: skip
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(2, 8)
    y = torch.relu(model.second(torch.relu(model.first(x)).roll(4, -1))).roll(4, -1)
    run = torch.compile(
        model,
        backend="qsync",
        options={"precision": "fp32", "inner_backend": "aot_eager", "passes": [halves]},
    )
    torch.testing.assert_close(run(x), y)
