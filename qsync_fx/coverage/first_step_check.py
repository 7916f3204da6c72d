"""The check of a plan after the first training step, when all graphs of a model are there.

Invariant: every model that torch.compile was given is checked once for each set of options, at the end of the first step of an optimizer
that holds its parameters. Where something planned is not applied, that raises with the option "strict", and warns else, once. The hook on
optimizers is there only as long as a model waits for it, or a later hook of someone else's stands behind it. A model that is not trained is
checked as its forward pass starts for the second time, for what is known then: that an operator is not there in modules that are in graphs.
What is in none may be there for training. Where several ranks train, and a gradient may be another rank's, a model is checked a step later.

What is said of a plan that is not applied: one text, for the error and for the warning.

Invariant: prose is made of findings, and decides nothing.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from qsync_fx.coverage.causes import nested, reason, way_out
from qsync_fx.coverage.compilation_log import Frame, Log, log_of, logs
from qsync_fx.coverage.findings import (
    Findings,
    Uncovered,
    Unused,
    findings,
    in_doubt,
    packed,
    uncovered,
)
from qsync_fx.coverage.module_coverage import Tree, models, watch
from qsync_fx.errors import PlanError, PlanWarning, shown
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import OpId

_SHOWN = 6


def not_applied(result: Findings, name: str) -> PlanError:
    """Returns the error for the model called `name`."""
    subject, lost = [], result.lost
    if lost:
        subject.append(
            f"{_count(len(lost), 'module')} of {name} {_agree(lost, 'runs')} as written, in no graph of this backend"
        )
    if result.unused:
        entries = _count(len(result.unused), "entry", "entries")
        subject.append(f"{entries} of the plan {_agree(result.unused, 'decides')} on nothing")
    where = [*_places(lost), *map(unused_text, result.unused[:_SHOWN])]
    methods = [way_out(module.cause) for module in lost] + [_way(entry) for entry in result.unused]
    do = [*_distinct(methods), "qsync_fx.plan_coverage(model) lists everything"]
    return PlanError(
        f"the plan is not applied: {'; '.join(subject)}", where="; ".join(where), do="; ".join(do)
    )


def unused_text(entry: Unused) -> str:
    """Says which entry of the plan decides on nothing, and what it names."""
    named = (
        f"the operator {entry.entry}"
        if isinstance(entry.entry, OpId)
        else f"the pattern {shown(entry.entry)}"
    )
    if entry.inside:
        return f"{named} ({entry.precision}) names what is in no graph: {_list([module.path for module in entry.inside])}"
    return f"{named} ({entry.precision}) names nothing that a plan decides on"


def _places(lost: Sequence[Uncovered]) -> list[str]:
    """One text for each reason, with the modules that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for module in lost:
        by_reason.setdefault(reason(module.cause), []).append(
            f"{module.path or 'the model itself'} ({module.type})"
        )
    return [f"{_list(modules)}: {why}" for why, modules in by_reason.items()]


def _way(entry: Unused) -> str:
    if entry.inside:
        return way_out(entry.inside[0].cause)
    return (
        f"nearest: {', '.join(entry.near)}"
        if entry.near
        else 'remove it, or see the ids with "qsync inspect"'
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _count(number: int, item: str, many: str = "") -> str:
    return f"{number} {item if number == 1 else many or item + 's'}"


def _agree(things: Sequence[object], verb: str) -> str:
    return verb if len(things) == 1 else verb.removesuffix("s")


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


class _Hook:
    def __init__(self) -> None:
        self.handle: RemovableHandle | None = None
        self.checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


_hook = _Hook()


def wait_for_a_step() -> None:
    """Makes sure that what has been compiled is checked after a training step."""
    if _hook.handle is None:
        _hook.handle = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return  # an optimizer that is compiled: a hook would break its graph
    available = logs()
    latest = available[-1].last if available else 0
    if _hook.checked.get(optimizer) == latest:
        return
    _hook.checked[optimizer] = latest
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for log in available:
        for root in models(log):
            if root not in log.settled and any(
                id(p) in trained and p.grad is not None for p in root.parameters()
            ):
                if _waits(root, log):
                    _hook.checked.pop(optimizer, None)
                    continue
                log.settled.add(root)
                settle(root, log)
    if (
        not any(root not in log.settled for log in available for root in models(log))
        and _hook.handle is not None
    ):
        _leave(_hook.handle)


def _leave(handle: RemovableHandle) -> None:
    """Takes the hook away, unless there are later ones: torch goes through them at this moment, and would miss them."""
    hooks = handle.hooks_dict_ref()
    if hooks is None or next(reversed(hooks), None) == handle.id:
        handle.remove()
        _hook.handle = None


def _waits(root: nn.Module, log: Log) -> bool:
    """Whether a model is to be checked after the next step, where modules in it will be known to have run on this rank, or not."""
    if root in log.watched:
        return False
    doubtful = in_doubt(Tree(root, log))
    if doubtful:
        log.watched.add(root)
        watch(doubtful, log)
    return bool(doubtful)


def settle(root: nn.Module, log: Log) -> None:
    """Raises or warns where something that is planned for a model is not applied.

    Raises:
        PlanError: with the option "strict".
    """
    tree = Tree(root, log)
    _tell(findings(tree.intended, tree.decided(), uncovered(tree)), tree)


def settle_when_called_again(
    run: Callable[..., Any], root: nn.Module, options: Options
) -> Callable[..., Any]:
    """Returns the code of the first graph of a model's forward pass, which checks the model when it is called for the second time.

    Then all that a forward pass runs has been compiled. It is for code of evaluation, which no training step may follow.
    """
    ref, calls = weakref.ref(root), itertools.count()

    @functools.wraps(run)
    def checked(*args: Any) -> Any:
        if next(calls) == 1 and (model := ref()) is not None:
            _settle_evaluation(model, log_of(options))
        return run(*args)

    return checked


def settle_packed(frames: Sequence[Frame], log: Log) -> None:
    """Says at once that layers run as written because a function packs what they take: evaluation does so, and training does not.

    Raises:
        PlanError: with the option "strict".
    """
    if any(nested(frame) is not None for frame in frames):
        for tree in (Tree(root, log) for root in models(log)):
            _tell(replace(packed(tree, frames), unused=()), tree)


def _settle_evaluation(root: nn.Module, log: Log) -> None:
    if root in log.settled:
        return
    tree = Tree(root, log)
    result = findings(tree.intended, tree.decided(), uncovered(tree))
    _tell(Findings((), tuple(entry for entry in result.unused if not entry.inside)), tree)


def _tell(result: Findings, tree: Tree) -> None:
    log = tree.log
    if not log.options.strict or tree.within:
        # An entry is told of once. The parts of a model that are given one by one have one plan.
        result = replace(
            result, unused=tuple(entry for entry in result.unused if entry.entry not in log.told)
        )
        log.told.update(entry.entry for entry in result.unused)
    if not result:
        return
    error = not_applied(result, type(tree.root).__name__)
    if log.options.strict:
        raise error
    warnings.warn(str(error), PlanWarning, stacklevel=_outside_torch())


def _outside_torch() -> int:
    """How many calls above there is a line of the user's: the one that makes the step."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "qsync_fx.")
    ):
        level, frame = level + 1, frame.f_back
    return level
