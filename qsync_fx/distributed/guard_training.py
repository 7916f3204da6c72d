"""`guard`: context that synchronizes errors of data-parallel training over ranks.

Invariant: an error on any rank ends training on every rank with an error that names the rank and
its reason, unless the process is killed before. The guard changes no tensor or random state.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from qsync_fx.allocator.plan_result import PredictedCost
from qsync_fx.distributed import agreement
from qsync_fx.distributed.agreement import COMPILING, Meeting, check_replicas
from qsync_fx.distributed.memory_use import PeakCheck
from qsync_fx.distributed.replan import Replanner, Replanning, ReplanReport
from qsync_fx.distributed.sample_weighted_mean import averages_by_batch, samples_in
from qsync_fx.errors import OptionError, PlanError
from qsync_fx.plan import ClusterPlan
from qsync_fx.plan.cluster_plan import local_batch
from qsync_fx.plan.plan import DEVICE_CLASS
from qsync_fx.plan_switching import options_of, when_called

_LOG = logging.getLogger("qsync_fx.distributed")


def guard(
    model: nn.Module,
    *,
    compiling: float = COMPILING,
    silence: float | None = None,
    check_every: int = 0,
    same_batch: bool = True,
    replan: Replanning | None = None,
) -> Guard:
    """Return a guard: `with qsync_fx.distributed.guard(model): train()`, on all ranks.

    If a plan was made for a memory limit, a rank that exceeds the limit in a step logs a warning.
    If a plan has local batches, a rank logs a warning if its first step, or the passes of a later
    step, have another number of samples. With the option "strict" it raises `PlanError`.
    Without torch.distributed, or with a single rank, the guard is inactive. Raise `OptionError` if
    an argument is invalid.

    Args:
        model: the trained module as it is called: compiled, a DistributedDataParallel, or both.
        compiling: seconds that a rank may compile, regardless of the timeout of the process group.
        silence: seconds without a heartbeat until a rank has failed; default: the group's timeout.
        check_every: optimizer steps between bit-exact comparisons of the parameters; 0 for never.
        same_batch: whether it is an error that ranks start with batches of different sizes, unless
            gradients are weighted by batch size.
        replan: switches to another plan when the speed of a device or its free memory changes.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"guard requires a torch.nn.Module, not {type(model).__name__}", do="pass the model"
        )
    for name, value in (("compiling", compiling), ("silence", silence)):
        if value is not None and not value > 0:
            text = f"{name} must be a positive number of seconds, not {value}"
            raise OptionError(text, where=f"guard(..., {name}=...)", do="use a number above 0")
    if check_every < 0:
        text, do = f"check_every must be a number of steps, not {check_every}", "use 0 for never"
        raise OptionError(text, where="guard(..., check_every=...)", do=do)
    return Guard(model, compiling, silence, check_every, same_batch, replan)


_PREFETCHED: Final = 100
"""Steps after a change of the plan in which loaders may still have batches of the last plan."""


class BatchCheck:
    """Comparison of the samples of a rank's steps with the local batch of its plan.

    `who` is the rank and its device class.
    """

    def __init__(self, model: nn.Module, who: str) -> None:
        self._model, self._who = model, who
        self._samples, self._checked, self._warned = 0, 0, False
        self._last, self._steps = 0, 0  # local batch of the last plan, steps under this plan

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the samples of a training pass."""
        if module.training and torch.is_grad_enabled():
            self._samples += samples_in((args, kwargs))

    def stepped(self) -> None:
        """Compare a step. After the first, fewer samples are no fault: an epoch ends."""
        samples, self._samples, self._steps = self._samples, 0, self._steps + 1
        for options in options_of(self._model):
            planned = None if options.plan is None else local_batch(options.plan.notes)
            if planned is None:
                continue
            if planned != self._checked:  # the first step of this plan
                self._last, self._checked = self._checked, planned
                self._steps, self._warned = 0, False
            elif samples <= planned:
                continue
            if samples in (0, planned) or self._warned:
                continue
            if samples == self._last and self._steps < _PREFETCHED:
                continue
            self._warned = True
            text = f"{self._who}: a step has {samples} samples, but the plan's local batch is "
            text += f"{planned}: its predicted time, memory and variance do not apply"
            do = "use qsync_fx.distributed.DistributedBatchSampler(dataset, plan) in the DataLoader"
            error = PlanError(text, where="local batches of the plan", do=do)
            if options.strict:
                raise error
            _LOG.warning("%s", error)


@dataclass(eq=False, repr=False)
class Guard:
    """Context for one training, created by `guard`."""

    _model: nn.Module
    _compiling: float
    _silence: float | None
    _check_every: int
    _same_batch: bool
    _replan: Replanning | None

    def __post_init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._steps = self._within = 0
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._peaks: PeakCheck | None = None
        self._batches: BatchCheck | None = None
        self._replanner: Replanner | None = None

    @property
    def plan(self) -> ClusterPlan | None:
        """Active plan, if the guard replans; None otherwise."""
        if self._replanner is not None:
            return self._replanner.plan
        return None if self._replan is None else self._replan.plan

    @property
    def replanned(self) -> tuple[ReplanReport, ...]:
        """Decisions on drift so far, in order."""
        return () if self._replanner is None else tuple(self._replanner.history)

    def __enter__(self) -> Guard:
        if not agreement.several_ranks():
            return self
        with contextlib.ExitStack() as stack:
            meeting = stack.enter_context(Meeting(self._compiling, self._silence))
            settings = ["none"]
            if self._replan is not None:
                samples = "samples stay" if self._replan.sampler is None else "samples move"
                settings = [str(self._replan.hysteresis), samples]
            mine = {**agreement.of_model(self._model), "replanning": settings}
            meeting.agree("models and plans", mine)
            stack.enter_context(agreement.compiles_told(meeting))
            if self._model._compiled_call_impl is None:
                # Hooks of a module that is compiled in place are compiled with it.
                compare = self._first_call(meeting)
                handle = self._model.register_forward_pre_hook(compare, with_kwargs=True)
                stack.callback(handle.remove)
            self._watch(meeting, stack)
            if self._check_every or self._peaks is not None or self._batches is not None:
                before, after = map(agreement.uncompiled, (self._before_step, self._after_step))
                stack.callback(register_optimizer_step_pre_hook(before).remove)
                stack.callback(register_optimizer_step_post_hook(after).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[1] is not None or self._steps == 0 or not self._check_every:
            self._stack.__exit__(*exception)
            return
        with self._stack:
            check_replicas(self._model)

    def _watch(self, meeting: Meeting, stack: contextlib.ExitStack) -> None:
        plans = [options.plan for options in options_of(self._model) if options.plan is not None]
        costs = [PredictedCost.noted(plan.notes) for plan in plans]
        limited = [cost for cost in costs if cost.memory is not None]
        names = [plan.notes[DEVICE_CLASS] for plan in plans if DEVICE_CLASS in plan.notes]
        who = " ".join([f"rank {meeting.rank}", *(f"({name})" for name in names[:1])])
        if any(local_batch(plan.notes) is not None for plan in plans):
            self._batches = self._checked_batches(who, stack)
        if not limited and self._replan is None:
            return
        self._peaks = PeakCheck(self._model, who, lambda: self._optimizers)
        self._peaks.follow([*limited, PredictedCost()][0])
        stack.callback(self._peaks.close)
        stack.callback(when_called(self._model, self._peaks.called))
        if self._replan is not None:
            self._replanner = Replanner(
                self._model, self._replan, meeting, self._peaks, lambda: self._optimizers
            )
            stack.enter_context(self._replanner.pace)

    def _checked_batches(self, who: str, stack: contextlib.ExitStack) -> BatchCheck | None:
        if self._model._compiled_call_impl is not None:
            text = f"{who}: the plan has local batches, but those of a model that is compiled in "
            text += "place are not compared with it"
            do = "use qsync_fx.distributed.DistributedBatchSampler(dataset, plan), or pass the "
            do += "DistributedDataParallel to the guard"
            _LOG.warning("%s", PlanError(text, where="local batches of the plan", do=do))
            return None
        result = BatchCheck(self._model, who)
        hook = agreement.uncompiled(result.called)
        handle = self._model.register_forward_pre_hook(hook, with_kwargs=True)
        stack.callback(handle.remove)
        return result

    def _first_call(self, meeting: Meeting) -> Any:
        called = False

        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal called
            if called or not (module.training and torch.is_grad_enabled()):
                return
            called = True
            sizes = self._same_batch and not averages_by_batch(self._model)
            meeting.agree("batches", agreement.of_batch(args, kwargs, sizes), patient=True)

        return agreement.uncompiled(compare)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._trains(optimizer):
            return
        self._optimizers.add(optimizer)
        # Within a step of a sharded optimizer, parameters may be updated on one rank only.
        if self._within == 0:
            if self._replanner is not None:
                self._replanner.begin()
            if self._check_every and self._steps and self._steps % self._check_every == 0:
                check_replicas(self._model)
            self._steps += 1
        self._within += 1

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._trains(optimizer):
            return
        self._within -= 1
        if self._within == 0:
            if self._batches is not None:
                self._batches.stepped()
            if self._peaks is not None:
                self._peaks.stepped()
            if self._replanner is not None:
                self._replanner.end()

    def _trains(self, optimizer: Optimizer) -> bool:
        live = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in live for p in self._model.parameters())
