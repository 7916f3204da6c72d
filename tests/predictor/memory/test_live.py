"""What a step holds by buffers, and as terms that are there or not by the states of single
operators.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx.predictor.cost_mapper import States, states
from qsync_fx.predictor.memory import SavedTerm, live_buffers, saved_terms, step_memory
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import lives
from qsync_fx.predictor.memory.forward import Forward
from tests.support.planning.predicted_models import graph_of, plans

NAMES = ("mlp", "odd", "checkpointed", "tied", "vgg")


def there(term: SavedTerm, found: States, before: int) -> bool:
    return any(one.until <= before and found.names[one.place] == one.state for one in term.keepers)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_live_buffers_sum_to_the_memory_of_a_moment(name: str, data: st.DataObject) -> None:
    found = states(graph_of(name), data.draw(plans(name)))
    memory = step_memory(found)
    live = live_buffers(found)
    assert [(moment.place == "backward", moment.operator) for moment in memory.moments[:-1]] == [
        (one.backward, one.operator) for one in live
    ]
    assert [moment.bytes - memory.held_bytes for moment in memory.moments[:-1]] == [
        sum(one.bytes.values()) for one in live
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_terms_bound_the_saved_bytes(name: str, data: st.DataObject) -> None:
    graph = graph_of(name)
    found = states(graph, data.draw(plans(name)))
    terms = saved_terms(graph)
    assert len({(term.value, term.format) for term in terms}) == len(terms)
    forward = Forward(found)
    backward = Backward(forward).tasks
    saved = {b for task in forward.tasks for b in task.writes} & {
        b for task in backward for b in task.reads
    }
    for live in lives([*forward.tasks, *backward], False, lambda buffer: buffer in saved, False):
        if live.backward and live.operator:
            before = graph.places[live.operator]
            assert live.kinds.get(True, 0) <= sum(
                term.bytes for term in terms if there(term, found, before)
            )
