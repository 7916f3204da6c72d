"""Validation of a plan against the operators of a model.

A plan for another model must not be applied in part: entries without an operator would be lost
silently, and operators without an entry would train in an unplanned precision.

Invariant: a valid plan decides on every operator, and if all operators are known, each of its
operators and patterns decides on at least one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from qsync_fx.errors import PlanError, shown
from qsync_fx.formatting import many
from qsync_fx.plan.operator_id import OpId, alternatives, escaped, module_regex, pattern_regex

if TYPE_CHECKING:
    from qsync_fx.formats import Precision
    from qsync_fx.plan.plan import Plan

_SHOWN = 10


@dataclass(frozen=True)
class Misfit:
    """Differences between a plan and a model's operators.

    Attributes:
        missing: operators for which the plan has no precision.
        unused: entries of the plan that select no operator, with precision and similar names. If
            only an alternative in braces selects none, the entry is that alternative.
    """

    missing: tuple[OpId, ...]
    unused: tuple[tuple[OpId | str, Precision, tuple[str, ...]], ...]

    @property
    def operators(self) -> list[OpId]:
        """Return the operators of the plan that the model does not have."""
        return [entry for entry, _, _ in self.unused if isinstance(entry, OpId)]


def misfit(plan: Plan, op_ids: Sequence[OpId], observed: Iterable[OpId] = ()) -> Misfit:
    """Return the differences between a plan and the operators, including `observed` ones."""
    available = dict.fromkeys((*op_ids, *observed))
    texts = [str(op_id) for op_id in available]
    unused: list[tuple[OpId | str, Precision, tuple[str, ...]]] = []
    operators = (item for item in plan.operators.items() if item[0] not in available)
    # The error message shows only the first entries.
    for count, (op_id, precision) in enumerate(operators):
        near = () if count >= _SHOWN else tuple(_close(str(op_id), texts))
        unused.append((op_id, precision, near))
    patterns = ((idle, fmt) for pattern, fmt in plan.patterns for idle in _idle(pattern, texts))
    for count, (pattern, precision) in enumerate(patterns):
        near = () if count >= _SHOWN else _near(pattern, texts)
        unused.append((pattern, precision, near))
    missing = tuple(op_id for op_id in op_ids if plan.precision_for(op_id) is None)
    return Misfit(missing, tuple(unused))


def _idle(pattern: str, texts: Sequence[str]) -> list[str]:
    """Return the parts of a pattern that select no operator: itself, or alternatives in braces."""

    def is_idle(pattern: str) -> bool:
        return not any(map(pattern_regex(pattern).match, texts))

    return [pattern] if is_idle(pattern) else list(filter(is_idle, alternatives(pattern)))


def check_plan(
    plan: Plan,
    op_ids: Sequence[OpId],
    complete: bool,
    observed: Iterable[OpId] = (),
    modules: Collection[str] | None = None,
    as_written: Collection[OpId | str] = (),
) -> None:
    """Raise `PlanError` if `plan` was made for another model; see `Plan.check`.

    Args:
        plan, op_ids, complete: as in `Plan.check`.
        observed: operators of other graphs of the model.
        modules: paths of all modules; None if unknown. Entries outside them are errors.
        as_written: operators and patterns of the plan that are valid without a graph.
    """
    result = misfit(plan, op_ids, observed)
    unused = tuple(entry for entry in result.unused if entry[0] not in as_written)
    result = replace(result, unused=unused)
    extra = [op_id for op_id in result.operators if complete or _is_elsewhere(op_id, modules)]
    if result.missing or extra:
        raise _another_model(plan, result, extra, op_ids)
    idle = {entry: near for entry, _, near in result.unused if isinstance(entry, str)}
    for position, (pattern, _) in enumerate(plan.patterns):
        for part in filter(idle.__contains__, (pattern, *alternatives(pattern))):
            where = f"patterns[{position}] of the plan"
            if part != pattern:
                where += f", {shown(pattern)}"
            if complete:
                message = f"none of the {len(op_ids)} adjustable operators"
                raise _selects_nothing(part, where, message, idle[part])
            if modules is None:
                continue
            if not any(map(module_regex(part).match, map(escaped, modules))):
                near = idle[part] or tuple(_close(part.partition("/")[0], modules))
                raise _selects_nothing(part, where, f"none of the {len(modules)} modules", near)


def _is_elsewhere(op_id: OpId, modules: Collection[str] | None) -> bool:
    """Return whether an operator's module is known not to exist."""
    return modules is not None and (op_id.module or op_id.after) not in modules


def _another_model(
    plan: Plan, result: Misfit, extra: Sequence[OpId], op_ids: Sequence[OpId]
) -> PlanError:
    subject, where, advice = [], [], "use the plan of this model"
    if result.missing:
        subject.append(f"has no precision for {len(result.missing)} of the {len(op_ids)} operators")
        where.append(_list("missing from the plan", result.missing))
        advice += ", or set a default precision in the plan"
    if extra:
        subject.append(f"names {many(len(extra), 'operator')} that the model does not have")
        where.append(_list("in the plan, not in this model", extra))
    elif result.operators:
        where.append(_list("in the plan, not in this part of the model", result.operators))
    near = _nearest_to(result.missing, list(plan.operators), "the plan")
    near = near or _nearest_to(result.operators, op_ids, "the model")
    do = "; ".join([advice, *near])
    return PlanError(f"the plan {' and '.join(subject)}", where="; ".join(where), do=do)


def _selects_nothing(pattern: str, where: str, description: str, near: Sequence[str]) -> PlanError:
    do = 'remove it, or list operator ids with "qsync inspect"'
    if near:
        do = f"nearest: {', '.join(near)}"
    return PlanError(f"the pattern {shown(pattern)} selects {description}", where=where, do=do)


def _near(pattern: str, texts: list[str]) -> tuple[str, ...]:
    return tuple(_close(pattern, texts if "/" in pattern else _modules(texts)))


def _list(title: str, op_ids: Sequence[OpId]) -> str:
    texts = [text if len(text) <= 200 else f"{text[:200]}..." for text in map(str, op_ids[:_SHOWN])]
    if len(op_ids) > _SHOWN:
        texts.append(f"... ({len(op_ids)} in total)")
    return f"{title}: {', '.join(texts)}"


def _nearest_to(strangers: Sequence[OpId], available: Sequence[OpId], owner: str) -> list[str]:
    """Return at most one line: names similar to one of the first three `strangers`."""
    texts = [str(op_id) for op_id in available]
    for text in map(str, strangers[:3]):
        if close := _close(text, texts):
            return [f"nearest to {shown(text)} in {owner}: {', '.join(close)}"]
    return []


def _close(text: str, available: Iterable[str]) -> list[str]:
    # Time is proportional to both lengths and to the number of names: bound it.
    candidates = islice((name for name in available if len(name) <= 200), 5000)
    return difflib.get_close_matches(text[:200], candidates, n=3, cutoff=0.5)


def _modules(texts: Iterable[str]) -> list[str]:
    """Return the paths of all modules with operators and of their ancestors, as ids write them."""
    result: dict[str, None] = {}
    for text in texts:
        path = text.partition("/")[0]
        while path and path not in result:
            result[path] = None
            path = path.rpartition(".")[0]
    return list(result)
