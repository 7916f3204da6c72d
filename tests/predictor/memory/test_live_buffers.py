"""Live buffers of a training step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import step_memory
from tests.support.planning.predicted_models import graph_of, live_buffers, plans

NAMES = ("mlp", "odd", "checkpointed", "tied", "vgg")


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_live_buffers_sum_to_the_memory_of_a_moment(name: str, data: st.DataObject) -> None:
    planned = states(graph_of(name), data.draw(plans(name)))
    memory = step_memory(planned)
    live = live_buffers(planned)
    assert [(moment.place == "backward", moment.operator) for moment in memory.moments[:-1]] == [
        (buffers.backward, buffers.operator) for buffers in live
    ]
    assert [moment.bytes - memory.held_bytes for moment in memory.moments[:-1]] == [
        sum(buffers.bytes.values()) for buffers in live
    ]
