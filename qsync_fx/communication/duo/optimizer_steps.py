"""Optimizer steps under DUO: each step becomes a commit and a lookahead step.

The commit applies the FP32 mean of the previous gradients, which was reduced during this forward
and backward pass, to the parameters and state from before the previous step. The user's own call
then takes a lookahead step with the fast mean; its change of the optimizer's state is rolled back.

                BACKWARD
      IDLE    ------------>   AVERAGED
       ^      <------------    |    ^
       |          DROP         |    |
COMMIT |                       |    | COMMIT
       |          LOOKAHEAD    |    |
       |      +----------------+    |
       |      v   BACKWARD          |
      AHEAD   ------------>   AVERAGED_AHEAD
              <------------
                  DROP

A backward pass ends with BACKWARD, `optimizer.step()` is COMMIT (if steps are AHEAD) and LOOKAHEAD,
`flush()` is COMMIT, and `skip()` or a mean that is not finite is DROP. The FP32 reduction starts
with AHEAD and ends before COMMIT. Invariant: between steps, the optimizer's state and the committed
parameters are those of a training with FP32 gradients, computed one lookahead step ahead.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qsync_fx.communication.bucket import Bucket, ParameterSlice
from qsync_fx.communication.compressor_state import finite
from qsync_fx.communication.duo import functional_optimizer
from qsync_fx.communication.duo.functional_optimizer import Settings, copied
from qsync_fx.communication.duo.offload import Offload
from qsync_fx.communication.duo.optimizer_parameters import ReplicatedParameters
from qsync_fx.communication.statistics import LookaheadStatistics
from qsync_fx.errors import OptionError

_INTEGERS = {integer.itemsize: integer for integer in (torch.int16, torch.int32)}


@dataclass(frozen=True)
class Use:
    """Inputs of an optimizer step apart from parameters, state and gradients."""

    groups: Settings
    used: Sequence[bool]  # whether each parameter had a gradient
    factor: float = 1.0  # applied to the gradients after the backward pass
    scale: Tensor | None = None  # that the optimizer removes itself

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler would skip the step for an infinity."""
        return self.factor != 1.0 or self.scale is not None


@dataclass
class PendingStep:
    """Gradients of one step, copied before the fast reduction, that await their FP32 mean."""

    step: int
    begun: float = field(default_factory=time.perf_counter)
    buckets: list[Bucket] = field(default_factory=list)  # copies of the gradients, reduced in place
    gradients: dict[int, Tensor] = field(default_factory=dict)  # those in `buckets`
    means: dict[int, Tensor] = field(default_factory=dict)  # the same of the fast reduction
    versions: list[tuple[int, int] | None] = field(default_factory=list)  # after the backward pass
    aside: list[tuple[int, int] | None] = field(default_factory=list)
    finite: bool = True  # whether all fast means are finite
    plain: int = 0  # digest of the fast means
    unscaled: int = 0  # digest of their product with `factor`
    factor: float | None = None  # inverse scale of the GradScaler
    use: Use | None = None  # None before the optimizer's call
    reduced_at: float = 0.0  # time of the complete FP32 mean

    def close(self, factor: float | None, used: bool) -> None:
        """Record digests of the fast means, to detect changes of gradients before the step."""
        means, self.factor = list(self.means.values()), factor
        self.finite = used and all(map(finite, means))
        self.plain = self.unscaled = _digest(means)
        if factor is not None:
            self.unscaled = _digest(mean * factor for mean in means)
        self.means = {}

    def factor_found(
        self, gradients: Sequence[Tensor | None], aside: Sequence[Tensor | None]
    ) -> float | None:
        """Return the factor applied to the gradients; None if they, or `aside`, changed else."""
        if not self.finite:
            return 1.0
        if versions(aside) != self.aside:
            return None
        digest = _digest(g for g in gradients if g is not None)
        if self.factor is not None and digest == self.unscaled:
            return self.factor
        # A write without effect, as by clipping below its limit, may have an effect in the next
        # step. With a GradScaler, the means are unchanged if the optimizer unscales them itself.
        is_unchanged = self.factor is not None or versions(gradients) == self.versions
        return 1.0 if digest == self.plain and is_unchanged else None


def versions(gradients: Iterable[Tensor | None]) -> list[tuple[int, int] | None]:
    """Return identity and version counter of each tensor."""
    return [None if g is None else (id(g), g._version) for g in gradients]


def _digest(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the bit patterns as integers, which changes with scaling or addition."""
    words = (tensor.view(_INTEGERS[tensor.itemsize]) for tensor in tensors)
    return sum(int(item.sum(dtype=torch.int64)) for item in words) % 2**64


def saved(
    pending: PendingStep, committed: Sequence[Tensor], pieces: Sequence[ParameterSlice]
) -> dict[str, Any]:
    """Return a copy of a pending step and the committed parameters, equal on unsharded ranks."""
    assert pending.use is not None
    names = [piece.name for piece in pieces]
    weights = dict(zip(names, committed, strict=True))
    gradients = {names[place]: gradient for place, gradient in pending.gradients.items()}
    state = {"step": pending.step, "weights": weights, "gradients": gradients}
    return {name: copied(value) for name, value in {**state, "use": vars(pending.use)}.items()}


def load(
    state: Mapping[str, Any], committed: Sequence[Tensor], pieces: Sequence[ParameterSlice]
) -> PendingStep:
    """Write the parameters into `committed`, and return the pending step, if of this model."""
    weights, gradients = state["weights"], state["gradients"]
    for piece, weight in zip(pieces, committed, strict=True):
        if piece.name not in weights or weights[piece.name].shape != weight.shape:
            where = f"{piece.name}, {list(weight.shape)}"
            do = "load the state of the same model"
            raise OptionError("the state of DUO belongs to another model", where=where, do=do)
    for piece, weight in zip(pieces, committed, strict=True):
        weight.copy_(weights[piece.name])
    places = {piece.name: place for place, piece in enumerate(pieces)}
    pending = PendingStep(state["step"], use=Use(**copied(state["use"])))
    pending.gradients = {places[name]: gradient.clone() for name, gradient in gradients.items()}
    return pending


def check_rank(state: Mapping[str, Any], rank: int, world: int) -> None:
    """Raise `OptionError` for a state of another rank or world size, which has other shards."""
    if (state.get("rank"), state.get("world")) != (rank, world):
        text = f"the state belongs to rank {state.get('rank')} of {state.get('world')}, whose "
        text += f"optimizer has other shards than rank {rank} of {world}"
        do = "load each rank's own state; for other ranks, use handle.whole_optimizer_state()"
        raise OptionError(text, where="the sharded state of DUO", do=do)


class Outstanding:
    """Number of the pending step; warns if `training` is finalized before it is committed."""

    def __init__(self, training: object, rank: int) -> None:
        self.step: int | None = None
        self._rank = rank
        weakref.finalize(training, self._ended)

    def _ended(self) -> None:
        if self.step is not None:
            text = (
                f"rank {self._rank}: training with DUO ended before the full-precision gradients "
            )
            text += (
                f"of step {self.step} were applied: the parameters are of a lookahead step. Call"
            )
            text += " handle.flush() before evaluation, before saving and at the end of training"
            warnings.warn(text, stacklevel=2)


class StepState(Enum):
    """Which gradients exist: of a backward pass that no step has used, and of a lookahead step."""

    IDLE = False, False
    AVERAGED = True, False
    AHEAD = False, True
    AVERAGED_AHEAD = True, True


class Steps:
    """Commit and lookahead steps of an optimizer; `wait` waits for the communication thread."""

    def __init__(
        self,
        optimizer: Optimizer,
        live: ReplicatedParameters,
        memory: Offload,
        has_lookahead: bool,
        outstanding: Outstanding,
        wait: Callable[[], None],
        after_lookahead: Callable[[PendingStep], None],
    ) -> None:
        self._optimizer, self._parameters, self._has_lookahead = optimizer, live, has_lookahead
        self._outstanding, self._wait, self._after_lookahead = outstanding, wait, after_lookahead
        self._memory = memory
        self.averaged: PendingStep | None = None
        self.pending: PendingStep | None = None
        self.statistics, self._in_own_step = LookaheadStatistics(), False
        self._in_lookahead = False
        self._free_buffers: dict[int, list[Tensor]] = {}
        self._unused_gradients: list[Tensor | None] | None = None

    @property
    def state(self) -> StepState:
        return StepState((self.averaged is not None, self.pending is not None))

    def follow(self) -> None:
        """Register the commit and lookahead step as step hooks of the optimizer."""
        uncompiled: Any = torch.compiler.disable
        self._optimizer.register_step_pre_hook(uncompiled(self._before))
        self._optimizer.register_step_post_hook(uncompiled(self._after))

        def wait_recovered(*_: object) -> None:
            self._memory.wait_recovered()

        self._optimizer.register_state_dict_pre_hook(wait_recovered)
        self._optimizer.register_load_state_dict_pre_hook(wait_recovered)

    def restore(self, pending: PendingStep | None) -> None:
        """Continue from a loaded pending step, or without one."""
        self.averaged, self.pending = None, pending
        if pending is not None:
            self._outstanding.step = pending.step

    def begin(self, step: int) -> PendingStep:
        """Start to record the gradients of a backward pass."""
        self.drop_unused()
        self.averaged = PendingStep(step)
        return self.averaged

    def drop_unused(self) -> None:
        """Drop gradients that no step has used, as for a GradScaler that found an infinity."""
        if self.averaged is None:
            return
        if self.averaged.finite:
            text = "no optimizer step has used the averaged gradients of the previous backward pass"
            do = "accumulate gradients under ddp.no_sync(); discard them with handle.skip()"
            raise OptionError(text, where=f"step {self.averaged.step} of DUO", do=do)
        self.statistics.skipped += 1
        self._release(self.averaged)
        self.averaged = None

    def commit(self, since: float) -> bool:
        """Apply the FP32 mean, awaited since the time `since`; return whether there is one."""
        pending, live = self.pending, self._parameters
        if pending is None or (use := pending.use) is None:
            return False
        self.statistics.waited += max(0.0, pending.reduced_at - since)
        self._memory.wait_recovered()
        with torch.no_grad():
            for p, saved in zip(live.stepped, live.committed, strict=True):
                self._memory.copy(saved, p)
        slow = [
            pending.gradients[place] if is_used else None for place, is_used in enumerate(use.used)
        ]
        with self._memory.gradients_replaced(live.stepped, slow):
            self._step_with_slow_gradients(pending, use)
        self._release(pending)
        self.pending = self._outstanding.step = None
        return True

    def _step_with_slow_gradients(self, pending: PendingStep, use: Use) -> None:
        if use.factor != 1.0:
            for p in self._parameters.stepped:
                if p.grad is not None:
                    p.grad.mul_(use.factor)
        if use.is_scaled and not self._parameters.finite(pending.step):
            self.statistics.skipped += 1
            text = f"the full-precision gradients of step {pending.step} are not finite, although "
            warnings.warn(f"{text}the low-precision ones were: the step is skipped", stacklevel=5)
            return
        self._in_own_step = True
        try:
            with (
                functional_optimizer.under(self._optimizer, use.groups),
                functional_optimizer.scaled_by(self._optimizer, use.scale),
            ):
                # With the optimizer's hooks, but without wrappers of the instance.
                type(self._optimizer).step(self._optimizer)
        finally:
            self._in_own_step = False
        self.statistics.committed += 1

    def buffer(self, values: Tensor) -> Tensor:
        """Return a reused FP32 buffer for a copy; allocation costs more than a copy."""
        if free := self._free_buffers.get(values.numel()):
            return free.pop()
        return self._memory.empty_like(values, torch.float32)

    def _release(self, step: PendingStep) -> None:
        for bucket in step.buckets:
            self._free_buffers.setdefault(bucket.values.numel(), []).append(bucket.values)
        step.buckets, step.gradients = [], {}

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_own_step:
            return
        if args[1:] or any(value is not None for value in kwargs.values()):
            text = "optimizer.step has arguments such as a closure, which DUO cannot repeat"
            do = "run the backward pass first, then call optimizer.step() without arguments"
            raise OptionError(text, where="optimizer.step(...)", do=do)
        self._wait()
        self._memory.wait_recovered()
        averaged, live = self.averaged, self._parameters
        if averaged is None:
            if any(p.grad is not None for p in live.stepped):
                text = "the gradients were not averaged since the last optimizer step"
                do = "call optimizer.step() once after each backward pass outside ddp.no_sync()"
                raise OptionError(text, where="optimizer.step()", do=do)
            return
        averaged.use, infinite = self._use(averaged)
        if infinite:
            averaged.finite = False
            self.drop_unused()
            return
        self.commit(averaged.begun)
        for saved, p in zip(live.committed, live.stepped, strict=True):
            self._memory.copy(p.detach(), saved)
        self.averaged, self.pending = None, averaged
        self._outstanding.step = averaged.step
        self._memory.save_state(optimizer.state)
        self._in_lookahead = True
        if not self._has_lookahead:
            self._unused_gradients = [p.grad for p in live.stepped]
            for p in live.stepped:
                p.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_own_step or not self._in_lookahead or self.pending is None:
            return
        self._memory.recover_state(optimizer.state)
        if self._unused_gradients is not None:
            for p, gradient in zip(self._parameters.stepped, self._unused_gradients, strict=True):
                p.grad = gradient
        self._in_lookahead, self._unused_gradients = False, None
        self._after_lookahead(self.pending)

    def _use(self, averaged: PendingStep) -> tuple[Use, bool]:
        scale, infinite = functional_optimizer.scaling(self._optimizer)
        gradients = [p.grad for p in self._parameters.stepped]
        factor = averaged.factor_found(gradients, self._parameters.aside())
        if factor is None:
            text = "gradients were changed between the backward pass and the step, which DUO cannot"
            text += " repeat for the full-precision gradients"
            do = "after compress(...), call optimizer.register_step_pre_hook(clip) with a function "
            do += f"clip(*_) that calls {self._parameters.clip_advice}; pass a GradScaler as scaler"
            raise OptionError(text, where=f"step {averaged.step} of DUO", do=do)
        used = [g is not None for g in gradients]
        settings = functional_optimizer.settings(self._optimizer)
        return Use(settings, used, factor, scale), infinite
