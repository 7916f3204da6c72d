"""What is said of a plan that is not applied: one text, for the error and for the warning.

Invariant: prose is made of findings, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qsync_fx.coverage.causes import reason, way_out
from qsync_fx.coverage.findings import Findings, Uncovered, Unused
from qsync_fx.errors import PlanError, shown
from qsync_fx.plan.opid import OpId

_SHOWN = 6


def not_applied(found: Findings, name: str) -> PlanError:
    """Returns the error for the model called `name`."""
    what, lost = [], found.lost
    if lost:
        what.append(
            f"{_count(len(lost), 'module')} of {name} {_agree(lost, 'runs')} as written, in no graph of this backend"
        )
    if found.unused:
        entries = _count(len(found.unused), "entry", "entries")
        what.append(f"{entries} of the plan {_agree(found.unused, 'decides')} on nothing")
    where = [*_places(lost), *map(unused_text, found.unused[:_SHOWN])]
    ways = [way_out(module.cause) for module in lost] + [_way(entry) for entry in found.unused]
    do = [*_distinct(ways), "qsync_fx.applied(model) lists everything"]
    return PlanError(f"the plan is not applied: {'; '.join(what)}", where="; ".join(where), do="; ".join(do))


def unused_text(entry: Unused) -> str:
    """Says which entry of the plan decides on nothing, and what it names."""
    named = f"the operator {entry.entry}" if isinstance(entry.entry, OpId) else f"the pattern {shown(entry.entry)}"
    if entry.inside:
        return (
            f"{named} ({entry.precision}) names what is in no graph: {_list([module.path for module in entry.inside])}"
        )
    return f"{named} ({entry.precision}) names nothing that a plan decides on"


def _places(lost: Sequence[Uncovered]) -> list[str]:
    """One text for each reason, with the modules that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for module in lost:
        by_reason.setdefault(reason(module.cause), []).append(f"{module.path or 'the model itself'} ({module.type})")
    return [f"{_list(modules)}: {why}" for why, modules in by_reason.items()]


def _way(entry: Unused) -> str:
    if entry.inside:
        return way_out(entry.inside[0].cause)
    return f"nearest: {', '.join(entry.near)}" if entry.near else 'remove it, or see the ids with "qsync inspect"'


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _agree(things: Sequence[object], verb: str) -> str:
    return verb if len(things) == 1 else verb.removesuffix("s")


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
