"""Reports on a plan that is not applied: after the first training step, and at Dynamo's limit.

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
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from qsync_fx.coverage.compilation_log import Frame, Log, Tree, log_of, logs, models, watch
from qsync_fx.coverage.findings import (
    Findings,
    Reason,
    Unused,
    findings_of,
    in_doubt,
    kind_of,
    nested,
    packed,
)
from qsync_fx.errors import PlanError, PlanWarning, shown
from qsync_fx.formatting import many
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import OpId

_SHOWN = 6


def not_applied(result: Findings, name: str) -> PlanError:
    """Return the error for findings of the model `name`; it is also the text of the warning."""
    subject, lost = [], result.lost
    if lost:
        subject.append(f"no compiled graph contains {many(len(lost), 'module')} of {name}")
    if result.unused:
        count = many(len(result.unused), "entry", "entries")
        subject.append(f"no operator matches {count} of the plan")
    by_reason: dict[str, list[str]] = {}
    for module in lost:
        text = f"{module.path or 'the model itself'} ({module.type})"
        by_reason.setdefault(module.cause.reason, []).append(text)
    where = [f"{_list(modules)}: {why}" for why, modules in by_reason.items()]
    where += map(unused_text, result.unused[:_SHOWN])
    do = [module.cause.advice for module in lost] + [_advice(entry) for entry in result.unused]
    do.append("qsync_fx.plan_coverage(model) lists everything")
    return PlanError(
        f"the plan is not applied: {'; '.join(subject)}",
        where="; ".join(where),
        do="; ".join(filter(None, dict.fromkeys(do))),
    )


def unused_text(entry: Unused) -> str:
    """Return a text about a plan entry that matches no operator."""
    text = f"the pattern {shown(str(entry.entry))} ({entry.precision})"
    if isinstance(entry.entry, OpId):
        text = f"the operator {entry.entry} ({entry.precision})"
    if entry.inside:
        modules = _list([module.path for module in entry.inside])
        return f"{text} refers to modules in no graph: {modules}"
    return f"{text} matches no operator that a plan decides on"


def _advice(entry: Unused) -> str:
    if entry.inside:
        return entry.inside[0].cause.advice
    if entry.near:
        return f"nearest: {', '.join(entry.near)}"
    return 'remove it, or see the ids with "qsync inspect"'


def _list(names: Sequence[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    return f"{text} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else text


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
    latest = max((log.last for log in available), default=0)
    if _hook.checked.get(optimizer) == latest:
        return
    _hook.checked[optimizer] = latest
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for root, log in _unsettled():
        if not any(id(p) in trained and p.grad is not None for p in root.parameters()):
            continue
        if _waits(root, log):
            _hook.checked.pop(optimizer, None)
        else:
            log.settled.add(root)
            settle(root, log)
    if _hook.handle is not None and not _unsettled():
        # torch is iterating over the hooks: without this one it would skip the next one.
        hooks = _hook.handle.hooks_dict_ref()
        if hooks is None or next(reversed(hooks), None) == _hook.handle.id:
            _hook.handle.remove()
            _hook.handle = None


def _unsettled() -> list[tuple[nn.Module, Log]]:
    return [(root, log) for log in logs() for root in models(log) if root not in log.settled]


def _waits(root: nn.Module, log: Log) -> bool:
    """Return whether the check waits a step, until it is known which modules run here."""
    if root in log.watched:
        return False
    doubtful = in_doubt(Tree(root, log))
    if doubtful:
        log.watched.add(root)
        watch(doubtful, log)
    return bool(doubtful)


def settle(root: nn.Module, log: Log) -> None:
    """Raise `PlanError` if the plan of a model does not apply and "strict" is set, else warn."""
    tree = Tree(root, log)
    _report(findings_of(tree), tree)


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
            log = log_of(options)
            if model not in log.settled:
                tree = Tree(model, log)
                unused = tuple(entry for entry in findings_of(tree).unused if not entry.inside)
                _report(Findings((), unused), tree)
        return run(*args)

    return checked


def settle_packed(frames: Sequence[Frame], log: Log) -> None:
    """Report layers that run uncompiled because a function packs nested tensors, like `settle`.

    It reports them immediately, since this happens in evaluation and not in training.
    """
    if any(nested(frame) is not None for frame in frames):
        for tree in (Tree(root, log) for root in models(log)):
            _report(replace(packed(tree, frames), unused=()), tree)


def _report(result: Findings, tree: Tree) -> None:
    log = tree.log
    if not log.options.strict or tree.within:
        # Each entry is reported once. Separately compiled parts of a model share one plan.
        unused = tuple(entry for entry in result.unused if entry.entry not in log.reported)
        result = replace(result, unused=unused)
        log.reported.update(entry.entry for entry in unused)
    if not result:
        return
    error = not_applied(result, type(tree.root).__name__)
    if log.options.strict:
        raise error
    # The warning is located at the user's code, outside of torch.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "qsync_fx.")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(str(error), PlanWarning, stacklevel=level)


def tell_of_a_limit(
    code: CodeType, options: Options, texts: Iterable[str], frames: Sequence[Frame] = ()
) -> None:
    """Report that Dynamo leaves a function to Python because of its recompile limit.

    There is no report without the limit among Dynamo's messages `texts`, or without operators of
    earlier versions that the plan decides on. With default options it warns, as uncompiled
    execution is the behavior of torch.compile; otherwise it raises `PlanError`. `frames` name the
    module of functions that torch wraps around it.
    """
    reported = next((text for text in texts if kind_of(text) is Reason.LIMIT), None)
    if reported is None or not _decides_on(code, options):
        return
    setting = "torch._dynamo.config.recompile_limit"
    if "accumulated_recompile_limit" in reported:
        setting = "torch._dynamo.config.accumulated_recompile_limit"
    function, where = code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"
    if frames:
        function, where = frames[0].name, frames[0].where
        if frames[0].path:
            function += f" of {frames[0].path} ({type(frames[0].module()).__name__})"
    message = f"Dynamo has reached {setting} for {function} and makes no more versions of it"
    do = f"set {setting} higher if so many versions are intended"
    do += "; TORCH_LOGS=recompiles shows why each was made"
    if options.is_default:
        text = f"{message}: others run uncompiled, as the model is written. To compile them, {do}."
        warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)
        return
    raise PlanError(
        f"{message}: this one would run as the model is written, without the plan",
        where=f"{function}, {where}",
        do=do,
    )


def _decides_on(code: CodeType, options: Options) -> bool:
    """Return whether a plan decides on operators in earlier versions of a function."""
    return any(
        ran.kind is Kind.ADJUSTABLE
        and (options.plan is None or options.plan.precision_for(ran.id) is not None)
        for log in logs()
        for (live, _), frame in log.frames.items()
        if live is code
        for ran in frame.operators.values()
    )
