"""Which casts a set of states takes, and what they cost: what `insert_casts` will do, foreseen without a graph.

Invariant: there is one cast here for each that the pass inserts. It is charged to the operator that reads it first; that of a result which
is given out in another format, to the operator that made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from qsync_fx.graph.algebra import Cost, Size, Work
from qsync_fx.graph.costs.flow import Flow
from qsync_fx.graph.costs.operator import size_in
from qsync_fx.graph.costs.places import Change, Held, Place, places
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.reads import State
from qsync_fx.precision import Precision

States = Mapping[fx.Node, State]


@dataclass(frozen=True)
class Cast:
    """
    Attributes:
        owner: the operator that it is made for; None for what the graph hands on as it was given.
        wanted: whether it is a conversion that the model itself asks for, which is an operator of its own.
        source: the node whose value is converted.
        before, after: the formats.
        cost: of the conversion or quantizer, and of its gradient.
    """

    owner: fx.Node | None
    source: fx.Node
    before: Precision
    after: Precision
    cost: Cost
    wanted: bool = False


def casts(flow: Flow, states: States, where: Sequence[Place | Change] | None = None) -> list[Cast]:
    """Returns the casts that a graph needs where its operators are in these states, and the model's own that convert anything there.

    Args:
        where: the graph's `places`, where they are known already.
    """
    found: dict[Any, Cast] = {}
    for place in places(flow) if where is None else where:
        if isinstance(place, Place):
            _read(found, flow, states, place)
        elif place.site.node in states:
            _changed(found, flow, states, place)
    return list(found.values())


def needs_cast(before: Precision | None, used: Precision | None, wanted: Precision | None) -> bool:
    """Whether a value has to be converted for a reader.

    Args:
        before: the format that it has where a cast would convert it.
        used: the format that it has where it is read, behind conversions of the model's own.
        wanted: the format that it is read in; None for whichever it has.
    """
    if wanted is None or before is None or wanted is before:
        return False
    return not (wanted.plain and (used is wanted or wanted.dtype is before.dtype))


def _read(found: dict[Any, Cast], flow: Flow, states: States, place: Place) -> None:
    reader = place.reader
    if reader is not None and reader.node not in states:
        return
    before, used = _format(place.origin_held, states), _format(place.used_held, states)
    precision = states[reader.node].precision if reader is not None else None
    wanted = place.wanted(precision)
    if wanted is None or before is None or not needs_cast(before, used, wanted):
        return
    key = place.shared, wanted.name
    if key not in found:
        owner = reader or place.origin_held.site
        cost = _cost(flow, place.graph, place.origin, before, wanted)
        found[key] = Cast(owner.node if owner is not None else None, place.origin, before, wanted, cost)


def _changed(found: dict[Any, Cast], flow: Flow, states: States, change: Change) -> None:
    node = change.site.node
    before, after = _format(change.held, states), states[node].output
    if before is None or after is None or before is after or (not change.wanted and before.dtype is after.dtype):
        return
    cost = _cost(flow, change.graph, change.source, before, after)
    found[node, change.wanted] = Cast(node, change.source, before, after, cost, change.wanted)


def _format(held: Held, states: States) -> Precision | None:
    """The format of a value in these states."""
    state = states.get(held.site.node) if held.site is not None else None
    return held.own if state is None else state.output or held.own


def _cost(flow: Flow, graph: PrecisionGraph, source: fx.Node, before: Precision, after: Precision) -> Cost:
    value = graph.value(source)
    return cast_cost(size_in(value, before), size_in(value, after), after, flow.needs(source))


def cast_cost(read: Size, written: Size, after: Precision, differentiated: bool) -> Cost:
    """Returns what converting or quantizing so many bytes costs."""
    if not after.plain:
        # A quantizer reads once for the scale and once for the values. The operator differentiates past it.
        return Cost(casts=Work(0, read * (2 if after.scaled else 1) + written))
    moved = Work(0, read + written)
    return Cost(casts=moved, casts_backward=moved if differentiated else Work())
