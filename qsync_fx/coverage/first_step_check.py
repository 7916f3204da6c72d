"""Check of a plan after the first training step, and its error or warning.

Each compiled model is checked once per set of options, after the first step of an optimizer with
its parameters. A plan that does not apply raises with the option "strict"; otherwise it warns once.
A model in evaluation is checked at its second forward pass, only for operators that are missing in
compiled modules, as uncovered modules may be for training. With several ranks the check may wait
one more step, since a gradient may come from another rank.

Invariant: the optimizer hook is removed when no model waits, unless later hooks follow it.
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
    """Return the error for findings of the model `name`; it is also the text of the warning."""
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
    """Return a text about a plan entry that matches no operator."""
    named = (
        f"the operator {entry.entry}"
        if isinstance(entry.entry, OpId)
        else f"the pattern {shown(entry.entry)}"
    )
    if entry.inside:
        return f"{named} ({entry.precision}) names what is in no graph: {_list([module.path for module in entry.inside])}"
    return f"{named} ({entry.precision}) names nothing that a plan decides on"


def _places(lost: Sequence[Uncovered]) -> list[str]:
    """Return one text per reason, with the modules that it applies to."""
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
    """Register the optimizer hook that checks compiled models after a training step."""
    if _hook.handle is None:
        _hook.handle = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return  # the hook would cause a graph break in a compiled optimizer
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
    """Remove the hook unless later hooks follow: torch is iterating and would skip the next one."""
    hooks = handle.hooks_dict_ref()
    if hooks is None or next(reversed(hooks), None) == handle.id:
        handle.remove()
        _hook.handle = None


def _waits(root: nn.Module, log: Log) -> bool:
    """Return whether the check of a model waits for the next step.

    By then it is known which of its uncovered modules run on this rank.
    """
    if root in log.watched:
        return False
    doubtful = in_doubt(Tree(root, log))
    if doubtful:
        log.watched.add(root)
        watch(doubtful, log)
    return bool(doubtful)


def settle(root: nn.Module, log: Log) -> None:
    """Raise or warn if the plan of a model does not apply.

    Raises:
        PlanError: the plan does not apply and the option "strict" is set.
    """
    tree = Tree(root, log)
    _tell(findings(tree.intended, tree.decided(), uncovered(tree)), tree)


def settle_when_called_again(
    run: Callable[..., Any], root: nn.Module, options: Options
) -> Callable[..., Any]:
    """Wrap the first graph of a model's forward pass to check the model at its second call.

    By then all graphs of a forward pass are compiled. It is for evaluation, which no training step
    may follow.
    """
    ref, calls = weakref.ref(root), itertools.count()

    @functools.wraps(run)
    def checked(*args: Any) -> Any:
        if next(calls) == 1 and (model := ref()) is not None:
            _settle_evaluation(model, log_of(options))
        return run(*args)

    return checked


def settle_packed(frames: Sequence[Frame], log: Log) -> None:
    """Report layers that run uncompiled because a function packs nested tensors.

    It reports them immediately, since this happens in evaluation and not in training.

    Raises:
        PlanError: there are such layers and the option "strict" is set.
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
        # Each entry is reported once. Separately compiled parts of a model share one plan.
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
    """Return the stack level of the user's code, for the location of the warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "qsync_fx.")
    ):
        level, frame = level + 1, frame.f_back
    return level
