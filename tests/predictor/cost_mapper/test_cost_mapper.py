"""The cost mapper: incremental changes of a plan, undo, totals and schedules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx import Plan, PlanError, ProfileError
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper import CostMapper, states
from qsync_fx.predictor.cost_mapper.times import Part, Schedule, Seconds
from tests.support.planning.predicted_models import FORMATS, DrawnTimes, adjustable, graph_of, plans
from tests.support.tiers import ALL

torch.set_num_threads(1)
NAMES = [
    "mlp",
    "odd",
    "broken",
    "checkpointed",
    pytest.param("vgg", marks=ALL),
    *(pytest.param(n, marks=ALL) for n in ("bert2", "resnet", "gpt2")),
]
TIMES = DrawnTimes()


def total(schedule: Schedule, *parts: Part) -> tuple[float, float]:
    forward, backward = (
        (e.seconds for e in entries if e.part in parts)
        for entries in (schedule.forward, schedule.backward)
    )
    return sum(forward), sum(backward)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changes_add_up_to_the_plan(name: str, data: st.DataObject) -> None:
    graph, ids = graph_of(name), adjustable(name)
    first = Plan(operators=dict.fromkeys(ids, data.draw(st.sampled_from(FORMATS))))
    mapper = CostMapper(graph, TIMES, first)
    now = [dict.fromkeys(ids, str(first.operators[next(iter(first.operators))]))]
    for operator, fmt, back in data.draw(
        st.lists(st.tuples(st.sampled_from(ids), st.sampled_from(FORMATS), st.booleans()))
    ):
        if back and len(now) > 1:
            mapper.undo()
            now.pop()
        else:
            mapper.set(operator, fmt)
            now.append({**now[-1], operator: fmt})
    afresh = CostMapper(graph, TIMES, now[-1])
    assert mapper.totals == afresh.totals
    assert mapper.states() == states(graph, now[-1])
    assert mapper.schedule() == afresh.schedule()
    while len(now) > 1:
        mapper.undo()
        now.pop()
    assert mapper.totals == CostMapper(graph, TIMES, first).totals


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_totals_equal_the_schedule(name: str, data: st.DataObject) -> None:
    mapper = CostMapper(graph_of(name), TIMES, data.draw(plans(name)))
    schedule, totals = mapper.schedule(), mapper.totals
    assert total(schedule, Part.FORWARD, Part.BACKWARD) == pytest.approx(
        (totals.forward, totals.backward)
    )
    assert total(schedule, Part.CAST) == pytest.approx(
        (totals.casts, totals.casts_backward + totals.unpacking)
    )
    assert schedule.seconds == pytest.approx(mapper.seconds)


def test_gradient_is_complete_after_its_last_reader() -> None:
    mapper = CostMapper(graph_of("broken"), TIMES, Plan.uniform("int8"))
    schedule = mapper.schedule()
    assert [parameter.path for parameter in schedule.parameters] == [
        "second.weight",
        "second.bias",
        "first.weight",
        "first.bias",
    ]
    assert {parameter.numel for parameter in schedule.parameters} == {64, 8}
    for path, index in schedule.ready.items():
        assert schedule.backward[index].operator == f"{path.partition('.')[0]}/linear"
    assert (
        schedule.ready["second.weight"]
        < schedule.ready["first.weight"]
        == len(schedule.backward) - 1
    )
    ends = mapper.schedule(whole_graphs=True).ready
    assert ends == schedule.ready, "gradients of a one-layer graph are complete at its end"


def test_a_shared_weight_waits_for_its_first_reader() -> None:
    graph = graph_of("tied")
    schedule = CostMapper(graph, TIMES, Plan.uniform("bf16")).schedule()
    (shared,) = graph.parameters
    assert [graph.operators[index].row for index in shared.readers] == ["embedding", "linear"]
    assert (
        schedule.backward[schedule.ready[shared.path]].operator
        == graph.operators[min(shared.readers)].id
    )


def test_gradients_of_a_graph_are_ready_together() -> None:
    mapper = CostMapper(graph_of("mlp"), TIMES, Plan.uniform("bf16"))
    assert len(set(mapper.schedule().ready.values())) == 3
    assert set(mapper.schedule(whole_graphs=True).ready.values()) == {
        len(mapper.schedule().backward) - 1
    }


def test_unpacking_applies_to_tensors_saved_in_scaled_formats() -> None:
    graph = graph_of("mlp")
    assert CostMapper(graph, TIMES, Plan.uniform("bf16")).totals.unpacking == 0
    mapper = CostMapper(graph, TIMES, {"0/linear": "int8", "2/linear": "bf16", "4/linear": "bf16"})
    # The model's input requires no gradient, so the weight is not saved.
    assert [graph.values[cast.value].name for cast in mapper.states().unpacked] == ["input_1"]
    assert mapper.totals.unpacking > 0
    mapper.set("0/linear", "int8_grad")
    assert mapper.totals.unpacking == 0, "int8_grad multiplies saved integers without unpacking"


def test_invalid_change_is_an_error_without_effect() -> None:
    class Partial(DrawnTimes):
        def operator(self, operator: str, state: OperandState, around: object) -> Seconds:
            return Seconds(float("nan") if str(state.precision) == "int8" else 1.0, 1.0)

    mapper = CostMapper(graph_of("mlp"), Partial(), Plan.uniform("bf16"))
    before = mapper.totals, mapper.states()
    with pytest.raises(ProfileError, match="nan seconds"):
        mapper.set("0/linear", "int8")
    with pytest.raises(PlanError, match="no plan decides"):
        mapper.set("1/relu", "int8")
    with pytest.raises(PlanError, match="'int9'"):
        mapper.set("0/linear", "int9")
    with pytest.raises(PlanError, match="take back"):
        mapper.undo()
    assert (mapper.totals, mapper.states()) == before
