"""Custom passes: position, scope, decisions and inserted nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.backend.operators import lowerings
from qsync_fx.errors import OptionError, PassError
from qsync_fx.graph import node_metadata
from qsync_fx.options import Options
from qsync_fx.passes.pass_base import Scope
from qsync_fx.passes.pass_manager import pipeline
from qsync_fx.passes.verifier import RULES
from tests.support.compiling.passes_on_net import Net, explain


@qsync_fx.graph_pass(after="assign")
def keep_head_fp32(graph: qsync_fx.PrecisionGraph) -> None:
    for op in graph.operators(kind="adjustable"):
        if op.id.module.endswith("classifier"):
            op.assign("fp32", reason="the head stays in FP32")


def test_a_custom_pass_decides() -> None:
    operators = {str(op.id): op for op in explain(keep_head_fp32, precision="int8").operators}
    assert str(operators["classifier/linear"].precision) == "fp32"
    assert operators["classifier/linear"].reason == "the head stays in FP32"
    assert str(operators["body/linear"].precision) == "int8"


def test_a_custom_pass_trains() -> None:
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(
        model,
        backend="qsync",
        options={"precision": "int8", "inner_backend": "aot_eager", "passes": [keep_head_fp32]},
    )
    compiled(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_custom_passes_run_at_their_position_in_order() -> None:
    @qsync_fx.graph_pass(after="cascade")
    def first(graph: qsync_fx.PrecisionGraph) -> None: ...

    @qsync_fx.graph_pass(after="cascade")
    def second(graph: qsync_fx.PrecisionGraph) -> None: ...

    @qsync_fx.graph_pass(before="lower")
    def third(graph: qsync_fx.PrecisionGraph) -> None: ...

    names = explain(third, first, second).passes
    assert names[names.index("cascade") + 1 :] == [
        "first",
        "second",
        "insert_casts",
        "third",
        "lower",
        "annotate_cost",
    ]


def test_pass_has_one_position() -> None:
    with pytest.raises(OptionError, match="one place"):
        qsync_fx.graph_pass(after="assign", before="lower")


def test_an_assignment_outlives_the_plan() -> None:
    @qsync_fx.graph_pass(before="assign")
    def early(graph: qsync_fx.PrecisionGraph) -> None:
        for op in graph.operators(kind="adjustable", pattern="body"):
            op.assign("fp32", reason="before the plan speaks")

    precisions = {str(op.id): str(op.precision) for op in explain(early).operators}
    assert precisions["body/linear"] == "fp32"
    assert precisions["classifier/linear"] == "bf16"


@pytest.mark.parametrize("returned", ["a graph", "a module", "text"])
def test_pass_with_a_return_value_is_an_error(returned: str) -> None:
    @qsync_fx.graph_pass(after="lower")
    def returns(graph: qsync_fx.PrecisionGraph) -> Any:
        return {"a graph": graph, "a module": graph.module, "text": returned}[returned]

    with pytest.raises(
        PassError,
        match=r"'returns' returned .*, not None",
    ):
        explain(returns)


class _Counts:
    """Pass without a base class, as another package may define it; records for each graph whether
    it is a body.
    """

    name = "counts"
    after = "cascade"

    def __init__(self) -> None:
        self.bodies: list[bool] = []

    def __call__(self, graph: qsync_fx.PrecisionGraph) -> None:
        self.bodies.append(graph.parent is not None)


class _Whole(_Counts):
    name = "whole"
    scope = Scope.MODEL


class _Each(_Counts):
    name = "each"
    scope = Scope.BODY


@pytest.mark.parametrize(
    ("kind", "bodies"), [(_Whole, [False]), (_Each, [False, True]), (_Counts, [False, True])]
)
def test_pass_receives_the_value_of_its_scope(kind: type[_Counts], bodies: list[bool]) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    step = kind()
    qsync_fx.explain(
        Checkpointed(), torch.randn(2, 8, requires_grad=True), options={"passes": [step]}
    )
    assert step.bodies == bodies


def test_pass_class_defines_name_and_scope() -> None:
    for step in pipeline(Options(gradient_rounding="stochastic"), lowerings()):
        assert {"name", "scope"} <= vars(type(step)).keys(), step
        assert not {"name", "scope"} & {field.name for field in dataclasses.fields(step)}, step  # type: ignore[arg-type]


def test_nodes_inserted_after_lowering_count_to_an_operator() -> None:
    @qsync_fx.graph_pass(after="annotate_cost")
    def tap(graph: qsync_fx.PrecisionGraph) -> None:
        last = graph.operators("adjustable")[-1].node
        with graph.graph.inserting_after(last):
            first = graph.graph.call_function(torch.ops.aten.argmax.default, (last,))
        with graph.graph.inserting_after(first):
            graph.graph.call_function(torch.ops.aten.neg.default, (first,))

    explanation = explain(tap)
    ids = {str(operator.id) for operator in explanation.operators}
    put_in = [
        node
        for node in explanation.graph_module("tap").graph.nodes
        if node.target is torch.ops.aten.neg.default
    ]
    assert [
        charge.owner in ids
        for node in put_in
        if (charge := node_metadata.charged(node)) is not None
    ] == [True]


def test_every_rule_has_a_validity() -> None:
    names = [*explain().passes]
    assert all(rule.since in names and rule.says for rule in RULES)
