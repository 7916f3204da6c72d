"""`guard`: what stands around training over several ranks, so that they agree before the first step and none waits for one that has failed.

It is a line of the user's and does not come by itself, since no rank can know what the others do: one may compile to evaluate, alone.

Invariant: under a guard an error on any rank, whatever it is, ends training on every rank with an error that names the rank and its reason,
unless a process is killed before it can tell. The guard changes no number: no tensor, no gradient, no random state.
"""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from qsync_fx.allocator.plan_result import PredictedCost
from qsync_fx.distributed.consensus import agreement
from qsync_fx.distributed.consensus.rendezvous import (
    COMPILING,
    Meeting,
    compiles_told,
    several_ranks,
)
from qsync_fx.distributed.monitoring.memory_use import PeakCheck
from qsync_fx.distributed.replan import Replanner, Replanning, ReplanReport
from qsync_fx.distributed.replica_check import check_replicas
from qsync_fx.distributed.sample_weighted_mean import averages_by_batch
from qsync_fx.errors import OptionError
from qsync_fx.plan import ClusterPlan
from qsync_fx.plan.plan import DEVICE_CLASS
from qsync_fx.plan_switching import options_of, when_called


def guard(
    model: nn.Module,
    *,
    compiling: float = COMPILING,
    silence: float | None = None,
    check_every: int = 0,
    same_batch: bool = True,
    replan: Replanning | None = None,
) -> Guard:
    """Returns the guard of a training, a context: `with qsync_fx.distributed.guard(model): train()`, on all ranks.

    Args:
        model: what is trained, as it is called: compiled, a DistributedDataParallel, or both in either order.
        compiling: seconds that a rank may compile, whatever the limit of the process group.
        silence: seconds that a rank may say nothing, as one that is stopped; by default the limit of the process group.
        check_every: after how many steps of the optimizer the ranks compare their parameters, to the last bit; 0 for never.
        same_batch: whether ranks that are called with batches of different sizes first are an error, as they are unless gradients are
            weighted by batch.
        replan: has another plan put in force when a device's speed or its free memory changes; see `Replanning`.

    Where a plan was made for a limit of memory, a rank that holds more in a step says so in its log.
    Where torch.distributed is not in use, or there is one rank, it does nothing.

    Raises:
        OptionError: an argument that it cannot take.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"guard takes a module, not {type(model).__name__}", do="give the model that is trained"
        )
    for name, value in (("compiling", compiling), ("silence", 1 if silence is None else silence)):
        if not value > 0:
            raise OptionError(f"{name} is a number of seconds above 0, not {value}", where="guard")
    if check_every < 0:
        raise OptionError(
            f"check_every is a number of steps, not {check_every}",
            where="guard",
            do="give 0 for never",
        )
    return Guard(model, compiling, silence, check_every, same_batch, replan)


class Guard:
    """A guard, as `guard` returns it: a context for one training."""

    def __init__(
        self,
        model: nn.Module,
        compiling: float,
        silence: float | None,
        check_every: int,
        same_batch: bool,
        replan: Replanning | None,
    ) -> None:
        self._model, self._compiling, self._silence = model, compiling, silence
        self._check_every, self._same_batch, self._replan = check_every, same_batch, replan
        self._stack = contextlib.ExitStack()
        self._steps = self._within = 0
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._peaks: PeakCheck | None = None
        self._replanner: Replanner | None = None

    @property
    def plan(self) -> ClusterPlan | None:
        """The plan in force, where the guard has been given one to replan from."""
        if self._replanner is not None:
            return self._replanner.found
        return None if self._replan is None else self._replan.found

    @property
    def replanned(self) -> tuple[ReplanReport, ...]:
        """What was decided when devices had changed, in order."""
        return () if self._replanner is None else tuple(self._replanner.history)

    def __enter__(self) -> Guard:
        """Compares what the ranks are about to do.

        Raises:
            RankError: on every rank: they differ, one of them does not come, or one has failed.
        """
        if not several_ranks():
            return self
        with contextlib.ExitStack() as stack:
            meeting = stack.enter_context(Meeting(self._compiling, self._silence))
            mine = {**agreement.of_model(self._model), **agreement.of_replanning(self._replan)}
            meeting.agree("models and plans", mine, agreement.REMEDIES)
            stack.enter_context(compiles_told(meeting))
            if self._model._compiled_call_impl is None:
                # Hooks of a module that is compiled in place are compiled with it.
                handle = self._model.register_forward_pre_hook(
                    self._first_call(meeting), with_kwargs=True
                )
                stack.callback(handle.remove)
            self._watch(meeting, stack)
            if self._check_every or self._peaks is not None or self._replanner is not None:
                before = register_optimizer_step_pre_hook(agreement.uncompiled(self._before_step))
                stack.callback(before.remove)
                after = register_optimizer_step_post_hook(agreement.uncompiled(self._after_step))
                stack.callback(after.remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tells the others of an error, or says whose failure it comes from.

        Raises:
            RankError: training has ended since another rank failed.
        """
        if error is not None or self._steps == 0 or not self._check_every:
            self._stack.__exit__(kind, error, traceback)
            return
        with self._stack:
            check_replicas(self._model)

    def _watch(self, meeting: Meeting, stack: contextlib.ExitStack) -> None:
        """Has the memory of steps measured, where it is limited, and their time, where the ranks may plan anew."""
        plans = [options.plan for options in options_of(self._model) if options.plan is not None]
        foreseen = next(
            (
                result
                for plan in plans
                if (result := PredictedCost.noted(plan.notes)).memory is not None
            ),
            None,
        )
        if foreseen is None and self._replan is None:
            return
        name = next(
            (plan.notes[DEVICE_CLASS] for plan in plans if DEVICE_CLASS in plan.notes), None
        )
        who = f"rank {meeting.rank}{'' if name is None else f' ({name})'}"
        self._peaks = PeakCheck(self._model, who, lambda: self._optimizers)
        self._peaks.follow(foreseen or PredictedCost())
        stack.callback(self._peaks.close)
        stack.callback(when_called(self._model, self._peaks.called))
        if self._replan is not None:
            of = self._model, self._replan, meeting, self._peaks
            self._replanner = Replanner(*of, lambda: self._optimizers)
            stack.enter_context(self._replanner.pace)

    def _first_call(self, meeting: Meeting) -> Any:
        called = False

        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal called
            if called or not (module.training and torch.is_grad_enabled()):
                return
            called = True
            mine = agreement.of_batch(
                args, kwargs, self._same_batch and not averages_by_batch(self._model)
            )
            meeting.agree("batches", mine, agreement.REMEDIES, patient=True)

        return agreement.uncompiled(compare)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Compares what the steps before have made: one that is under way may be whole on this rank alone, as of a sharded optimizer."""
        if not self._trains(optimizer):
            return
        self._optimizers.add(optimizer)
        if self._within == 0:
            if self._replanner is not None:
                self._replanner.begin()
            if self._check_every and self._steps and self._steps % self._check_every == 0:
                check_replicas(self._model)
            self._steps += 1
        self._within += 1

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._trains(optimizer):
            return
        self._within -= 1
        if self._within == 0:
            if self._peaks is not None:
                self._peaks.stepped()
            if self._replanner is not None:
                self._replanner.end()

    def _trains(self, optimizer: Optimizer) -> bool:
        live = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in live for p in self._model.parameters())
