"""What an allocator decides at once: an operator, or operators that are tied.

Invariant: each adjustable operator is in one unit, and every format of a unit is one that all of its operators can be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.errors import PlanError


@dataclass(frozen=True)
class Unit:
    """
    Attributes:
        operators: their ids, in the order in which they run.
        formats: what may be asked for, from the narrowest up.
    """

    operators: tuple[str, ...]
    formats: tuple[str, ...]


def units(part: DeviceClass, tied: Iterable[Sequence[str]] = ()) -> tuple[Unit, ...]:
    """Returns the units of a class of devices, in the order in which the first operator of each runs.

    Raises:
        PlanError: operators are tied that no format is common to.
    """
    leader = {operator: group[0] for group in tied for operator in group}
    groups: dict[str, list[str]] = {}
    for operator in part.choices:
        groups.setdefault(leader.get(operator, operator), []).append(operator)
    return tuple(Unit(tuple(group), _common(part, group)) for group in groups.values())


def spread(chosen: Mapping[Unit, str]) -> dict[str, str]:
    """Returns the plan that formats of units are."""
    return {operator: fmt for unit, fmt in chosen.items() for operator in unit.operators}


def _common(part: DeviceClass, group: Sequence[str]) -> tuple[str, ...]:
    first, *others = group
    found = tuple(fmt for fmt in part.choices[first] if all(fmt in part.choices[other] for other in others))
    if not found:
        do = "tie operators that take the same formats, such as those of equal blocks"
        raise PlanError(f"{len(group)} operators are tied that have no format in common", where=first, do=do)
    return found
