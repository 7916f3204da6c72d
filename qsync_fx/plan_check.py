"""Whether a plan was made for the model at hand, and if not, in what they differ.

A plan for another model must not be half applied: what it names and the model does not have is lost without a word, and
what it does not name trains in a precision nobody chose. Invariant: a plan that passes decides on every operator, and,
where all operators are known, each of its operators and patterns decides on at least one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from qsync_fx.errors import PlanError, shown
from qsync_fx.opid import OpId
from qsync_fx.patterns import pattern_regex

if TYPE_CHECKING:
    from qsync_fx.plan import Plan

_SHOWN = 10


def check_plan(plan: Plan, op_ids: Sequence[OpId], complete: bool) -> None:
    """Raises `PlanError` where `plan` was made for another model; see `Plan.check`."""
    known = set(op_ids)
    missing = [op_id for op_id in op_ids if plan.precision_for(op_id) is None]
    extra = [op_id for op_id in plan.operators if op_id not in known]
    if missing or (extra and complete):
        raise _another_model(missing, extra, op_ids, list(plan.operators), complete)
    if complete:
        _check_patterns(plan, op_ids)


def _another_model(
    missing: list[OpId], extra: list[OpId], op_ids: Sequence[OpId], planned: list[OpId], complete: bool
) -> PlanError:
    what, where = [], []
    if missing:
        what.append(f"has no precision for {len(missing)} of the {len(op_ids)} operators")
        where.append(_list("missing from the plan", missing))
    if extra and complete:
        what.append(f"names {len(extra)} operator{'s' * (len(extra) > 1)} that the model does not have")
    if extra:
        where.append(_list(f"in the plan, not in this {'model' if complete else 'part of the model'}", extra))
    do = ["use the plan of this model" + (", or give the plan a default precision" if missing else "")]
    do += _nearest_to(missing, planned, "the plan") or _nearest_to(extra, op_ids, "the model")
    return PlanError(f"the plan {' and '.join(what)}", where="; ".join(where), do="; ".join(do))


def _check_patterns(plan: Plan, op_ids: Sequence[OpId]) -> None:
    texts = [str(op_id) for op_id in op_ids]
    for position, (pattern, _) in enumerate(plan.patterns):
        selects = pattern_regex(pattern).match
        if not any(map(selects, texts)):
            close = _close(pattern, texts if "/" in pattern else _modules(texts))
            raise PlanError(
                f"the pattern {shown(pattern)} selects none of the {len(op_ids)} operators that a plan decides on",
                where=f"patterns[{position}] of the plan",
                do=f"nearest: {', '.join(close)}" if close else 'remove it, or see the ids with "qsync inspect"',
            )


def _list(title: str, op_ids: Sequence[OpId]) -> str:
    texts = [text if len(text) <= 200 else f"{text[:200]}..." for text in map(str, op_ids[:_SHOWN])]
    more = f", ... ({len(op_ids)} in all)" if len(op_ids) > _SHOWN else ""
    return f"{title}: {', '.join(texts)}{more}"


def _nearest_to(strangers: Sequence[OpId], known: Sequence[OpId], owner: str) -> list[str]:
    """Returns advice for the first of `strangers` that resembles something known, at most one line."""
    texts = [str(op_id) for op_id in known]
    for text in map(str, strangers[:3]):
        if close := _close(text, texts):
            return [f"nearest to {shown(text)} in {owner}: {', '.join(close)}"]
    return []


def _close(text: str, known: Iterable[str]) -> list[str]:
    # Similarity takes time in proportion to both lengths, and to how many there are: advice is not worth minutes.
    candidates = islice((name for name in known if len(name) <= 200), 5000)
    return difflib.get_close_matches(text[:200], candidates, n=3, cutoff=0.5)


def _modules(texts: Iterable[str]) -> list[str]:
    """Returns the paths of all modules that hold an operator, ancestors included, as ids write them."""
    found: dict[str, None] = {}
    for text in texts:
        path = text.partition("/")[0]
        while path and path not in found:
            found[path] = None
            path = path.rpartition(".")[0]
    return list(found)
