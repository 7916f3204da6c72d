"""Optimizer steps under DUO: each step becomes a commit and a lookahead step.

The commit applies the FP32 mean of the previous gradients, which was reduced during this forward
and backward pass, to the parameters and state from before the previous step. The user's own call
then takes a lookahead step with the fast mean, and its change of the optimizer's state is rolled
back. States (`Steps.state`) and transitions:

    IDLE --backward--> AVERAGED --step--> AHEAD --backward--> AVERAGED_AHEAD --step--> AHEAD

    state            event                               next state
    IDLE             backward pass, fast reduction       AVERAGED
    AVERAGED         optimizer.step(): lookahead         AHEAD
    AHEAD            backward pass, fast reduction       AVERAGED_AHEAD
    AVERAGED_AHEAD   optimizer.step(): commit, lookahead AHEAD
    AHEAD            flush(): commit                     IDLE
    AVERAGED         skip(), or a mean is not finite     IDLE
    AVERAGED_AHEAD   skip(), or a mean is not finite     AHEAD

The FP32 reduction starts with AHEAD and ends before the next commit. `_before` and `_after` run
around the user's call of the optimizer.

Invariant: between steps, the optimizer's state and the committed parameters are those of a training
with FP32 gradients, computed on parameters one lookahead step ahead.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qsync_fx.communication.duo import functional_optimizer
from qsync_fx.communication.duo.optimizer_parameters import ReplicatedParameters
from qsync_fx.communication.duo.pending_step import BufferPool, PendingStep, Use
from qsync_fx.communication.statistics import LookaheadStatistics
from qsync_fx.errors import OptionError


class Outstanding:
    """Pending step; warns if training ends before it is committed or saved.

    Args:
        training: object whose finalization, at process exit at the latest, ends the training.
        rank: rank for the warning.

    Attributes:
        step: number of the pending step, from the optimizer's call to its commit; None without.
    """

    def __init__(self, training: object, rank: int) -> None:
        self.step: int | None = None
        self._rank = rank
        weakref.finalize(training, self._ended)

    def _ended(self) -> None:
        if self.step is not None:
            warnings.warn(
                f"rank {self._rank}: training with DUO ended before the full-precision gradients "
                f"of step {self.step} were applied, so the parameters are those of a lookahead "
                "step. Call handle.flush() before evaluation, before saving and at the end of training",
                stacklevel=2,
            )


class StepState(Enum):
    """Which gradients exist between two calls of the user."""

    IDLE = "no gradients"
    AVERAGED = "gradients that no step has used"
    AHEAD = "gradients of a lookahead step that await their commit"
    AVERAGED_AHEAD = "gradients of a lookahead step, and those of the next backward pass"


class Steps:
    """Commit and lookahead steps of an optimizer.

    Args:
        optimizer: the user's optimizer.
        live: parameters that it steps.
        has_lookahead: whether parameters take a step with the fast means.
        outstanding: updated with the pending step.
        wait: returns once the communication thread is idle.
        after_lookahead: called with each pending step after its lookahead step.

    Attributes:
        averaged: gradients of a backward pass that no step has used yet.
        pending: gradients of the lookahead step, which await their commit.
        statistics: counts of steps.
        buffers: pool of buffers for gradient copies.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        live: ReplicatedParameters,
        has_lookahead: bool,
        outstanding: Outstanding,
        wait: Callable[[], None],
        after_lookahead: Callable[[PendingStep], None],
    ) -> None:
        self._optimizer, self._parameters, self._has_lookahead = optimizer, live, has_lookahead
        self._outstanding, self._wait, self._after_lookahead = outstanding, wait, after_lookahead
        self.averaged: PendingStep | None = None
        self.pending: PendingStep | None = None
        self.statistics, self.buffers = LookaheadStatistics(), BufferPool()
        self._saved_state: dict[Any, Any] | None = None
        self._unused_gradients: list[Tensor | None] | None = None
        self._in_own_step = False

    @property
    def state(self) -> StepState:
        if self.averaged is None:
            return StepState.IDLE if self.pending is None else StepState.AHEAD
        return StepState.AVERAGED if self.pending is None else StepState.AVERAGED_AHEAD

    def follow(self) -> None:
        """Register the commit and lookahead step as step hooks of the optimizer."""
        uncompiled: Any = torch.compiler.disable
        self._optimizer.register_step_pre_hook(uncompiled(self._before))
        self._optimizer.register_step_post_hook(uncompiled(self._after))

    def drop_unused(self) -> None:
        """Drop gradients that no step has used, as for a GradScaler that found an infinity."""
        if self.averaged is None:
            return
        if self.averaged.finite:
            raise OptionError(
                "no optimizer step has used the averaged gradients of the previous backward pass",
                where=f"step {self.averaged.step} of DUO",
                do="accumulate gradients under ddp.no_sync(), because DUO stores the gradients of "
                "one backward pass; call handle.skip() to discard gradients",
            )
        self.statistics.skipped += 1
        self.buffers.give(self.averaged)
        self.averaged = None

    def commit(self, since: float) -> bool:
        """Apply the full-precision gradients of the previous step; return whether there were any.

        Args:
            since: time from which the caller waited for them, for the statistics.
        """
        pending = self.pending
        if pending is None or pending.use is None:
            return False
        use, live = pending.use, self._parameters
        self.statistics.waited += max(0.0, pending.known - since)
        present = [p.grad for p in live.stepped]
        with torch.no_grad():
            for place, (p, saved) in enumerate(zip(live.stepped, live.kept, strict=True)):
                p.copy_(saved)
                p.grad = (
                    _gradient(p, pending.gradients[place], use.factor) if use.used[place] else None
                )
        if use.scaled and not live.finite(pending.step):
            self.statistics.skipped += 1
            warnings.warn(
                f"the full-precision gradients of step {pending.step} are not finite, although the "
                "low-precision ones were: the step is skipped",
                stacklevel=4,
            )
        else:
            with (
                self._own_step(),
                functional_optimizer.under(self._optimizer, use.groups),
                functional_optimizer.scaled_by(self._optimizer, use.scale),
            ):
                functional_optimizer.step(self._optimizer)
            self.statistics.committed += 1
        for p, gradient in zip(live.stepped, present, strict=True):
            p.grad = gradient
        self.buffers.give(pending)
        self.pending, self._outstanding.step = None, None
        return True

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_own_step:
            return
        if args[1:] or any(value is not None for value in kwargs.values()):
            raise OptionError(
                "optimizer.step has arguments such as a closure, but DUO repeats the step without "
                "them",
                where="optimizer.step(...)",
                do="run the backward pass first, then call optimizer.step() without arguments",
            )
        self._wait()
        averaged, live = self.averaged, self._parameters
        if averaged is None:
            if any(p.grad is not None for p in live.stepped):
                raise OptionError(
                    "the gradients were not averaged since the last optimizer step",
                    where="optimizer.step()",
                    do="call optimizer.step() once after each backward pass outside ddp.no_sync()",
                )
            return
        use, infinite = self._use(averaged)
        if infinite:
            averaged.finite = False
            self.drop_unused()
            return
        self.commit(averaged.begun)
        for saved, p in zip(live.kept, live.stepped, strict=True):
            saved.copy_(p.detach())
        averaged.use, self.averaged, self.pending = use, None, averaged
        self._outstanding.step = averaged.step
        self._saved_state = functional_optimizer.state(optimizer)
        if not self._has_lookahead:
            self._unused_gradients = [p.grad for p in live.stepped]
            for p in live.stepped:
                p.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_own_step or self._saved_state is None or self.pending is None:
            return
        functional_optimizer.put_back(optimizer, self._saved_state)
        if self._unused_gradients is not None:
            for p, gradient in zip(self._parameters.stepped, self._unused_gradients, strict=True):
                p.grad = gradient
        self._saved_state = self._unused_gradients = None
        self._after_lookahead(self.pending)

    def _use(self, averaged: PendingStep) -> tuple[Use, bool]:
        """Return how the optimizer uses the gradients, and whether an infinity skips the step."""
        scale, infinite = functional_optimizer.scaling(self._optimizer)
        gradients = [p.grad for p in self._parameters.stepped]
        factor = averaged.factor_found(gradients, self._parameters.aside())
        if factor is None:
            clips = (
                "handle.clip_grad_norm_(1.0)"
                if self._parameters.sharded
                else "clip_grad_norm_ and returns nothing"
            )
            raise OptionError(
                "gradients were changed between the backward pass and the step, and DUO cannot "
                "apply the same change to the full-precision gradients",
                where=f"step {averaged.step} of DUO",
                do="change them in a hook of the optimizer, which runs for both: after "
                "compress(...), call optimizer.register_step_pre_hook(clip) with a function "
                f"clip(*_) that calls {clips}; pass a GradScaler as compress(..., scaler=scaler)",
            )
        used = [g is not None for g in gradients]
        use = Use(
            functional_optimizer.settings(self._optimizer),
            used,
            factor,
            scale,
            factor != 1.0 or scale is not None,
        )
        return use, infinite

    @contextlib.contextmanager
    def _own_step(self) -> Iterator[None]:
        self._in_own_step = True
        try:
            yield
        finally:
            self._in_own_step = False


def _gradient(p: Tensor, mean: Tensor, factor: float) -> Tensor:
    result = mean if p.dtype == mean.dtype else mean.to(p.dtype)
    return result if factor == 1.0 else result.mul_(factor)
