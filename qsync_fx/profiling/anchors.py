"""The plans that a profile measured, as what a prediction of memory is corrected by.

Invariant: a profile's own model is the model that is predicted.
"""

from __future__ import annotations

from qsync_fx.predictor.mapper import states
from qsync_fx.predictor.memory import Anchor
from qsync_fx.profiling.profile import Profile


def anchors(profile: Profile, planned: bool = False) -> list[Anchor]:
    """Returns each run of a profile with the states of its operators and the most that a step held.

    Args:
        planned: whether of the user's plans alone, and of these those whose peak was measured.
    """
    graph = profile.graph
    adjustable = {operator.id for operator in graph.operators if operator.kind == "adjustable"}
    found: list[Anchor] = []
    for run in profile.runs:
        if planned and not (run.planned and run.peak_bytes):
            continue
        asked = {one.operator: one.precision for one in run.operators if one.operator in adjustable and one.precision}
        found.append(Anchor(states(graph, asked), run.peak_bytes))
    return found
