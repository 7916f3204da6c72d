"""How `Times` are asked for the cast of a value that a model graph holds.

Invariant: a price and an entry of a schedule come from the same question.
"""

from __future__ import annotations

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.model.value import ModelGraph
from qsync_fx.predictor.times import Seconds, Times


def cast_seconds(
    graph: ModelGraph, times: Times, owner: int, value: int, before: str, after: str, differentiated: bool = True
) -> Seconds:
    """Returns the time of a cast of a value for an operator, by their places.

    Args:
        differentiated: whether a gradient that flows back to the value does so through the cast.

    Raises:
        ProfileError: the time is not known, or the size is an expression.
    """
    held, operator = graph.values[value], graph.operators[owner]
    if not isinstance(held.numel, int):
        what = f"the time of a cast of {held.numel} elements is not known"
        raise ProfileError(what, where=operator.where, do="give sizes first: graph.at(batch=...)")
    return times.cast(operator.id, before, after, held.numel, differentiated and held.differentiated)
