"""Which states operators can take, over all plans that ask for certain formats.

Invariant: every state that a plan leads to is among them. Some that none leads to may be, as inputs are taken to be independent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from qsync_fx.precision import FORMATS, promoted
from qsync_fx.predictor.model.value import Choices, Follows, Name, Operator, StateNames


def reachable(operators: Sequence[Operator], formats: Iterable[str]) -> list[tuple[StateNames, ...]]:
    """Returns the states that each operator can take."""
    wanted = tuple(formats)
    outputs: list[set[Name]] = []
    found: list[tuple[StateNames, ...]] = []
    for operator in operators:
        decided = operator.decided
        states = _chosen(decided, wanted) if isinstance(decided, Choices) else _followed(decided, outputs)
        found.append(tuple(dict.fromkeys(states)))
        outputs.append({output for _, output in states})
    return found


def chosen(choices: Choices, planned: str, explicit: bool) -> str:
    """Returns the format that an operator computes in where a plan asks for one, for it or for all."""
    if choices.pinned is not None:
        return choices.pinned
    return choices.runs[choices.held if not explicit and planned in choices.keeps else planned]


def _chosen(choices: Choices, formats: Sequence[str]) -> list[StateNames]:
    runs = dict.fromkeys(chosen(choices, fmt, explicit) for fmt in formats for explicit in (True, False))
    found: list[StateNames] = []
    for run in runs:
        found.append((run, choices.outputs.get(run)))
        if choices.wide is not None and FORMATS[run].scaled:
            found.append((run, choices.wide))
    return found


def _followed(follows: Follows, outputs: Sequence[set[Name]]) -> list[StateNames]:
    known: set[Name] = {follows.given}
    for at in follows.operators:
        known = {widest(a, b) for a in known for b in outputs[at]}
    found = [followed(follows, fmt) for fmt in sorted(known, key=str)]
    return [(fmt, follows.named or fmt) for fmt in found]


@functools.cache
def widest(first: Name, second: Name) -> Name:
    """Returns the promotion of two formats, of which either may be missing."""
    if first is None or second is None:
        return first or second
    return promoted(FORMATS[first], FORMATS[second]).name


def followed(follows: Follows, promotion: Name) -> Name:
    """Returns the format that an operator computes in, given the promotion of its inputs' formats."""
    if promotion is None or (follows.promotes and follows.scalar > FORMATS[promotion].max):
        return follows.own
    return promotion
