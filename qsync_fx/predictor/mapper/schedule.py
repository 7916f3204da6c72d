"""One training step of one device, from states and times: what runs after what, and when each gradient is whole.

Invariant: operators run forward in program order, each behind the casts that are made for it, and backward in the reverse order, each
before what differentiates its casts. What activation checkpointing computes again is part of an operator's time in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qsync_fx.graph.reads import State
from qsync_fx.predictor.mapper.asking import cast_seconds
from qsync_fx.predictor.mapper.states import Cast, States
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.model.value import ModelGraph
from qsync_fx.predictor.schedule import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.times import NEIGHBOURS, Seconds, Times


def scheduled(states: States, times: Times, whole_graphs: bool = False) -> Schedule:
    """Returns the step of a model in these states.

    Args:
        whole_graphs: gradients of a graph come out together at the end of its backward pass, as a compiled backward pass returns them;
            else each when the last operator that reads its parameter is through.

    Raises:
        ProfileError: a time or a size is not known.
    """
    graph = states.graph
    own = list(_operators(states, times))
    casts = _by_owner(graph, states.casts, times)
    unpacked = _by_owner(graph, states.unpacked, times, differentiated=False)
    outside = times.outside()
    forward = [Entry("", Part.OUTSIDE, outside.forward)]
    backward = [Entry("", Part.OUTSIDE, outside.backward)]
    for at, operator in enumerate(graph.operators):
        forward += [Entry(operator.id, Part.CAST, cast.forward) for cast in casts.get(at, ())]
        forward.append(Entry(operator.id, Part.FORWARD, own[at].forward))
    ends: dict[int, int] = {}
    for at, operator in reversed(list(enumerate(graph.operators))):
        backward += [Entry(operator.id, Part.CAST, cast.forward) for cast in unpacked.get(at, ())]
        backward.append(Entry(operator.id, Part.BACKWARD, own[at].backward))
        backward += [Entry(operator.id, Part.CAST, cast.backward) for cast in reversed(casts.get(at, ()))]
        ends[at] = len(backward) - 1
    parameters = [parameter for parameter in graph.parameters if parameter.trained]
    last = [_last(graph, parameter.readers, whole_graphs) for parameter in parameters]
    return Schedule(
        tuple(forward),
        tuple(backward),
        times.optimizer(),
        tuple(Parameter(p.path, p.numel, p.dtype_bytes) for p in parameters),
        {p.path: ends.get(at, len(backward) - 1) for p, at in zip(parameters, last, strict=True)},
    )


def _last(graph: ModelGraph, readers: Sequence[int], whole_graphs: bool) -> int:
    """The operator whose backward pass comes last of those that make a gradient; -1 where none of a graph's does."""
    if not readers or not whole_graphs:
        return min(readers, default=-1)
    part = graph.operators[min(readers)].graph
    return next(at for at, operator in enumerate(graph.operators) if operator.graph == part)


def _operators(states: States, times: Times) -> Iterator[Seconds]:
    found = list(map(state_named, states.names))
    there: dict[int, State] = dict(enumerate(found))
    for at, operator in enumerate(states.graph.operators):
        around = [there.get(at + by) for by in NEIGHBOURS]
        yield times.operator(operator.id, found[at], around)


def _by_owner(
    graph: ModelGraph, casts: Sequence[Cast], times: Times, differentiated: bool = True
) -> Mapping[int, list[Seconds]]:
    found: dict[int, list[Seconds]] = {}
    for cast in casts:
        taken = cast_seconds(graph, times, cast.owner, cast.value, cast.before, cast.after, differentiated)
        found.setdefault(cast.owner, []).append(taken)
    return found
