"""Whether a plan was made for the model at hand, and if not, in what they differ.

A plan for another model must not be half applied: what it names and the model does not have is lost without a word, and
what it does not name trains in a precision nobody chose. Invariant: a plan that passes decides on every operator, and,
where all operators are known, each of its operators and patterns decides on at least one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from qsync_fx.errors import PlanError, shown
from qsync_fx.plan.operator_id import OpId, escaped
from qsync_fx.plan.patterns import alternatives, module_regex, pattern_regex

if TYPE_CHECKING:
    from qsync_fx.formats import Precision
    from qsync_fx.plan.plan import Plan

_SHOWN = 10


@dataclass(frozen=True)
class Misfit:
    """In what a plan and operators differ.

    Attributes:
        missing: the operators that the plan says nothing of.
        unused: the operators and patterns of the plan that decide on none, each with its precision and with what it resembles; of a
            pattern of which only an alternative in braces decides on none, that alternative.
    """

    missing: tuple[OpId, ...]
    unused: tuple[tuple[OpId | str, Precision, tuple[str, ...]], ...]

    @property
    def operators(self) -> list[OpId]:
        """The operators of the plan that are none of the model's."""
        return [entry for entry, _, _ in self.unused if isinstance(entry, OpId)]


def misfit(plan: Plan, op_ids: Sequence[OpId], observed: Iterable[OpId] = ()) -> Misfit:
    """Returns in what a plan differs from the operators that it decides on, those `seen` before included."""
    available = dict.fromkeys((*op_ids, *observed))
    texts = [str(op_id) for op_id in available]
    operators = [
        (op_id, precision) for op_id, precision in plan.operators.items() if op_id not in available
    ]
    patterns = [
        (idle, precision) for pattern, precision in plan.patterns for idle in _idle(pattern, texts)
    ]
    # Only so many are shown.
    near_operators = {op_id: tuple(_close(str(op_id), texts)) for op_id, _ in operators[:_SHOWN]}
    near_patterns = {pattern: _near(pattern, texts) for pattern, _ in patterns[:_SHOWN]}
    return Misfit(
        tuple(op_id for op_id in op_ids if plan.precision_for(op_id) is None),
        (
            *((op_id, precision, near_operators.get(op_id, ())) for op_id, precision in operators),
            *(
                (pattern, precision, near_patterns.get(pattern, ()))
                for pattern, precision in patterns
            ),
        ),
    )


def _idle(pattern: str, texts: Sequence[str]) -> list[str]:
    """Returns what of a pattern selects nothing: the pattern, or alternatives in its braces."""
    if not any(map(pattern_regex(pattern).match, texts)):
        return [pattern]
    return [
        item for item in alternatives(pattern) if not any(map(pattern_regex(item).match, texts))
    ]


def check_plan(
    plan: Plan,
    op_ids: Sequence[OpId],
    complete: bool,
    observed: Iterable[OpId] = (),
    modules: Collection[str] | None = None,
    as_written: Collection[OpId | str] = (),
) -> None:
    """Raises `PlanError` where `plan` was made for another model; see `Plan.check`.

    Args:
        plan, op_ids, complete: as there.
        seen: the operators of other graphs of the model.
        modules: the paths of all its modules; None where they are not known. What names none of them can decide on nothing.
        as_written: operators and patterns of the plan that are true without a graph.
    """
    result = misfit(plan, op_ids, observed)
    result = replace(
        result, unused=tuple(entry for entry in result.unused if entry[0] not in as_written)
    )
    extra = (
        result.operators
        if complete
        else [op_id for op_id in result.operators if _is_elsewhere(op_id, modules)]
    )
    if result.missing or extra:
        raise _another_model(plan, result, extra, op_ids)
    idle = {entry: near for entry, _, near in result.unused if isinstance(entry, str)}
    for position, (pattern, _) in enumerate(plan.patterns):
        for part in filter(idle.__contains__, (pattern, *alternatives(pattern))):
            where = f"patterns[{position}] of the plan" + (
                f", {shown(pattern)}" if part != pattern else ""
            )
            if complete:
                message = f"none of the {len(op_ids)} operators that a plan decides on"
                raise _selects_nothing(part, where, message, idle[part])
            if modules is not None and not any(
                map(module_regex(part).match, map(escaped, modules))
            ):
                near = idle[part] or tuple(_close(part.partition("/")[0], modules))
                raise _selects_nothing(part, where, f"none of the {len(modules)} modules", near)


def _is_elsewhere(op_id: OpId, modules: Collection[str] | None) -> bool:
    """Whether an operator's module is known not to be there."""
    return modules is not None and (op_id.module or op_id.after) not in modules


def _another_model(
    plan: Plan, result: Misfit, extra: Sequence[OpId], op_ids: Sequence[OpId]
) -> PlanError:
    subject, where = [], []
    if result.missing:
        subject.append(f"has no precision for {len(result.missing)} of the {len(op_ids)} operators")
        where.append(_list("missing from the plan", result.missing))
    if extra:
        subject.append(
            f"names {len(extra)} operator{'s' * (len(extra) > 1)} that the model does not have"
        )
        where.append(_list("in the plan, not in this model", extra))
    elif result.operators:
        where.append(_list("in the plan, not in this part of the model", result.operators))
    do = [
        "use the plan of this model"
        + (", or give the plan a default precision" if result.missing else "")
    ]
    do += _nearest_to(result.missing, list(plan.operators), "the plan")
    do += _nearest_to(result.operators, op_ids, "the model") if len(do) == 1 else []
    return PlanError(f"the plan {' and '.join(subject)}", where="; ".join(where), do="; ".join(do))


def _selects_nothing(pattern: str, where: str, description: str, near: Sequence[str]) -> PlanError:
    return PlanError(
        f"the pattern {shown(pattern)} selects {description}",
        where=where,
        do=f"nearest: {', '.join(near)}"
        if near
        else 'remove it, or see the ids with "qsync inspect"',
    )


def _near(pattern: str, texts: list[str]) -> tuple[str, ...]:
    return tuple(_close(pattern, texts if "/" in pattern else _modules(texts)))


def _list(title: str, op_ids: Sequence[OpId]) -> str:
    texts = [text if len(text) <= 200 else f"{text[:200]}..." for text in map(str, op_ids[:_SHOWN])]
    more = f", ... ({len(op_ids)} in all)" if len(op_ids) > _SHOWN else ""
    return f"{title}: {', '.join(texts)}{more}"


def _nearest_to(strangers: Sequence[OpId], available: Sequence[OpId], owner: str) -> list[str]:
    """Returns advice for the first of `strangers` that resembles something known, at most one line."""
    texts = [str(op_id) for op_id in available]
    for text in map(str, strangers[:3]):
        if close := _close(text, texts):
            return [f"nearest to {shown(text)} in {owner}: {', '.join(close)}"]
    return []


def _close(text: str, available: Iterable[str]) -> list[str]:
    # Similarity takes time in proportion to both lengths, and to how many there are: advice is not worth minutes.
    candidates = islice((name for name in available if len(name) <= 200), 5000)
    return difflib.get_close_matches(text[:200], candidates, n=3, cutoff=0.5)


def _modules(texts: Iterable[str]) -> list[str]:
    """Returns the paths of all modules that hold an operator, ancestors included, as ids write them."""
    result: dict[str, None] = {}
    for text in texts:
        path = text.partition("/")[0]
        while path and path not in result:
            result[path] = None
            path = path.rpartition(".")[0]
    return list(result)
