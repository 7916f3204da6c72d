"""Replanning without a new trace equals a new explanation with the same plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.diagnostics import Explanation
from qsync_fx.graph import PrecisionGraph
from tests.support import tiers
from tests.support.models.zoo import make
from tests.support.planning.predicted_models import ZOO, Broken, Checkpointed

torch.set_num_threads(1)
FORMATS = ("fp32", "bf16", "int8", "fp8", "tf32", "fp16")


def said(explanation: Explanation) -> list[tuple[object, ...]]:
    return [
        (str(op.id), op.kind, op.note.planned, op.precision, op.output, op.reason, op.note.cost)
        for op in explanation.operators
    ]


def plans(explanation: Explanation, seed: int) -> list[Plan]:
    draw = random.Random(seed)
    ids = [op.id for op in explanation.operators if op.kind == "adjustable"]
    single = Plan(operators={op_id: draw.choice(FORMATS) for op_id in ids})
    module = ids[0].module.partition(".")[0]
    return [
        single,
        Plan.uniform(draw.choice(FORMATS)),
        Plan("int8", [(module or "**", draw.choice(FORMATS))]),
    ]


OWN: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "checkpointed": lambda: (Checkpointed(), (torch.randn(4, 16, requires_grad=True),)),
    "broken": lambda: (Broken(), (torch.randn(4, 8),)),
}


def _of_zoo(name: str) -> tuple[tuple[nn.Module, tuple[Any, ...]], dict[str, Any]]:
    model, inputs = make(ZOO[name])
    return (model, ()), inputs


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=tiers.ALL)
            for name in ("bert", "resnet", "mixtral", "llama_recomputing")
        ),
        *OWN,
    ],
)
def test_replan_equals_a_new_explanation(name: str) -> None:
    torch.manual_seed(0)
    (model, inputs), named = (OWN[name](), {}) if name in OWN else _of_zoo(name)
    first = qsync_fx.explain(model, *inputs, **named)
    before = said(first), first.graph("lower")
    for plan in plans(first, seed=random.randrange(10**6)):
        again, fresh = (
            first.replanned(plan),
            qsync_fx.explain(model, *inputs, **named, options={"plan": plan}),
        )
        assert said(again) == said(fresh), plan.to_json()
        for step in fresh.passes:
            assert again.graph(step) == fresh.graph(step), (step, plan.to_json())
        assert again.plan() == fresh.plan()
        assert str(again) == str(fresh)
    assert (said(first), first.graph("lower")) == before, (
        "replanning does not change the original explanation"
    )


def test_a_pass_of_the_users_runs_again() -> None:
    @qsync_fx.graph_pass(after="assign")
    def keep_narrow_layers(graph: PrecisionGraph) -> None:
        for op in graph.operators(kind="adjustable"):
            if graph.value(op.node).shape[-1] < 16:
                op.assign("fp32", reason="narrow")

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    first = qsync_fx.explain(
        model, torch.randn(2, 8), options={"precision": "int8", "passes": [keep_narrow_layers]}
    )
    precisions = {
        str(op.id): str(op.precision) for op in first.replanned(Plan.uniform("bf16")).operators
    }
    assert precisions == {"0/linear": "bf16", "1/relu": "bf16", "2/linear": "fp32"}


def test_a_plan_for_another_model_is_refused() -> None:
    first = qsync_fx.explain(nn.Sequential(nn.Linear(8, 4)), torch.randn(2, 8))
    with pytest.raises(qsync_fx.PlanError, match="selects none"):
        first.replanned(Plan("bf16", [("encoder", "fp32")]))
