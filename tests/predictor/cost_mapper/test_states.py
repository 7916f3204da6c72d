"""States, casts and costs of a plan on a model graph, compared with the passes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx import Plan, PlanError
from qsync_fx.diagnostics import Explanation
from qsync_fx.graph import node_metadata
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import casts
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from tests.support.planning.predicted_models import cost_of, explained, graph_of, plans
from tests.support.tiers import ALL

torch.set_num_threads(1)


def called(node: str, graph: int) -> str:
    """Return the name in the model graph of a node of one of its graphs."""
    return f"{graph}:{node}" if graph else node


def agree(predicted: States, explanation: Explanation) -> None:
    operators = {
        str(op.id): op for op in explanation.operators if not node_metadata.bodies(op.node)
    }
    assert operators.keys() == predicted.graph.places.keys()
    for name, op in operators.items():
        assert predicted.names[predicted.graph.place(name)] == OperandState.of(op.note).names, name
        assert op.note.cost is not None
        number = predicted.graph.operator(name).graph
        saved = {
            (called(tensor, number), fmt): size
            for (tensor, fmt), size in op.note.cost.saved.items()
        }
        assert cost_of(predicted, name) == dataclasses.replace(op.note.cost, saved=saved), name
    expected: Counter[tuple[object, ...]] = Counter()
    for index, part in enumerate(explanation.graphs):
        flow = part.costing.flow
        for cast in casts(
            flow,
            {site.node: OperandState.of(operators[str(site.id)].note) for site in flow.sites},
            part.costing.places,
        ):
            assert cast.owner is not None
            source = called(cast.source.name, index)
            expected[
                str(flow.by_node[cast.owner].id),
                source,
                str(cast.before),
                str(cast.after),
                cast.wanted,
            ] += 1
    graph = predicted.graph
    assert expected == Counter(
        (graph.operators[c.owner].id, graph.values[c.value].name, c.before, c.after, c.wanted)
        for c in predicted.casts
    )


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "odd",
        "broken",
        "checkpointed",
        "vgg",
        *(pytest.param(n, marks=ALL) for n in ("bert2", "resnet", "gpt2", "mixtral")),
    ],
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_states_equal_the_passes(name: str, data: st.DataObject) -> None:
    plan = data.draw(plans(name))
    agree(states(graph_of(name), plan), explained(name).replanned(plan))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    graph = graph_of("mlp")
    with pytest.raises(PlanError, match="selects none"):
        states(graph, Plan("bf16", [("encoder", "fp32")]))
    with pytest.raises(PlanError, match="an operator has no format"):
        states(graph, {"0/linear": "int8"})
    with pytest.raises(PlanError, match="called '9/linear'"):
        states(graph, {"9/linear": "int8"})
