"""The check of a plan after the first training step, when all graphs of a model are there.

Invariant: every model that torch.compile was given is checked once for each set of options, at the end of the first step of an optimizer
that holds its parameters. Where something planned is not applied, that raises with the option "strict", and warns else. The hook on
optimizers is there only as long as a model waits for it.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from qsync_fx.coverage.findings import findings, uncovered
from qsync_fx.coverage.log import Log, logs
from qsync_fx.coverage.telling import not_applied
from qsync_fx.coverage.tree import Tree, models
from qsync_fx.errors import PlanWarning


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
    known = logs()
    latest = known[-1].last if known else 0
    if _hook.checked.get(optimizer) == latest:
        return
    _hook.checked[optimizer] = latest
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for log in known:
        for root in models(log):
            if root not in log.settled and any(id(p) in trained and p.grad is not None for p in root.parameters()):
                log.settled.add(root)
                settle(root, log)
    if not any(root not in log.settled for log in known for root in models(log)) and _hook.handle is not None:
        _hook.handle.remove()
        _hook.handle = None


def settle(root: nn.Module, log: Log) -> None:
    """Raises or warns where something that is planned for a model is not applied.

    Raises:
        PlanError: with the option "strict".
    """
    tree = Tree(root, log)
    found = findings(tree.plan, tree.decided(), uncovered(tree))
    if tree.within:
        # The parts of a model that are given one by one have one plan, which is told of once.
        found = replace(found, unused=tuple(entry for entry in found.unused if entry.entry not in log.told))
        log.told.update(entry.entry for entry in found.unused)
    if not found:
        return
    error = not_applied(found, type(tree.root).__name__)
    if log.options.strict:
        raise error
    warnings.warn(str(error), PlanWarning, stacklevel=_outside_torch())


def _outside_torch() -> int:
    """How many calls above there is a line of the user's: the one that makes the step."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "qsync_fx.")):
        level, frame = level + 1, frame.f_back
    return level
