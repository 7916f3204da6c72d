"""A training with DUO: what the hook of DistributedDataParallel, the user's call of the optimizer and a flush do.

A step of the user's optimizer becomes two. First the step before is *committed*: the mean of its gradients in FP32, which was reduced
behind this forward and backward pass, takes the parameters and the state from where the step before had begun. Then the user's own call
*looks ahead* from there with the fast mean, and what it makes of the state is taken back.

Invariant: between steps the optimizer's state and the parameters that are kept here are those of a training that sends all gradients in
FP32, of the gradients that parameters one look ahead had given; the model's parameters are one step ahead of them, or, after a flush, the
same. At most one slow reduction is under way, on the one thread that talks to other ranks.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.communication import geometry
from qsync_fx.communication.assigned import Assigned
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.communication.compression import Compression
from qsync_fx.communication.duo import pure, saving
from qsync_fx.communication.duo.ending import Outstanding
from qsync_fx.communication.duo.replica import Kept, Memory, Replica, Use, finite, versions
from qsync_fx.communication.duo.told import Ahead, DuoReport
from qsync_fx.communication.reduction import Bucket, Reducer
from qsync_fx.communication.state import State
from qsync_fx.errors import OptionError

_SAVED: Final = "duo"


class LookingAhead(Compression):
    """What `qsync_fx.distributed.compress` returns for DUO.

    Args:
        ahead: whether parameters take a step with the fast means.
        optimizer: what the user steps.
        scaler: the GradScaler, if there is one.
        joins: whether the model trains under `join`.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        world: int,
        named: Sequence[tuple[str, nn.Parameter]],
        assigned: Assigned,
        seed: int,
        check_every: int,
        ahead: bool,
        optimizer: Optimizer,
        scaler: Any,
        joins: Callable[[], bool],
    ) -> None:
        super().__init__(group, rank, world, named, assigned, seed, check_every)
        self._optimizer, self._scaler, self._joins = optimizer, scaler, joins
        self._slow = Reducer(group, State(rank, world, f"in full: {assigned.text}", seed))
        self._plain = tuple(geometry.piece(name, index, p.shape, PLAIN, world) for index, (name, p) in enumerate(named))
        self._kept = [p.detach().clone() for p in self._parameters] if world > 1 else []
        self._memory, self._ahead, self._looks_ahead = Memory(), Ahead(), ahead
        self._fresh: Replica | None = None
        self._pending: Replica | None = None
        self._saved: dict[Any, Any] | None = None
        self._put_aside: list[Tensor | None] | None = None
        self._stepping = False
        self._outstanding = Outstanding(self, rank)

    def follow(self) -> None:
        """Has the optimizer's steps committed and looked ahead; once, when all ranks agree."""
        if self._state.world > 1:
            uncompiled: Any = torch.compiler.disable
            self._optimizer.register_step_pre_hook(uncompiled(self._before_step))
            self._optimizer.register_step_post_hook(uncompiled(self._after_step))

    def hook(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Keeps a replica of a bucket, and gives it to the fast reduction."""
        if self._state.world == 1:
            return super().hook(state, bucket)
        step, last = self._state.step, bool(bucket.is_last())
        fresh = self._fresh
        if fresh is None or fresh.step != step:
            fresh = self._begin(step)
        self._keep(fresh, bucket)
        reduced = super().hook(state, bucket)
        if last:
            self._worker.submit(lambda: self._close(fresh))
        return reduced

    # DistributedDataParallel compares annotations with classes, and these are texts.
    hook.__annotations__.clear()

    def flush(self) -> None:
        """Brings parameters to where all gradients so far have been used in full: before evaluation, before parameters are saved for use
        and at the end of training. Ranks need not do so together, and training goes on from there.

        Raises:
            OptionError: a backward pass waits for its step.
        """
        begun = time.perf_counter()
        self.wait()
        self._drop_unused()
        self._commit(begun)

    def skip(self) -> None:
        """Says that no step will use the gradients of the last backward pass; on all ranks. Those that are not finite go by themselves."""
        self.wait()
        if self._fresh is not None:
            self._fresh.finite = False
            self._drop_unused()

    def state_dict(self) -> dict[str, Any]:
        """Returns what it takes to go on with the same bits, beside the states of the model and of the optimizer: parameters before the
        look ahead, and the gradients that they have not had in full yet. Nothing changes by it; each rank saves its own."""
        found = super().state_dict()
        self._drop_unused()
        pending = self._pending
        if pending is None or pending.use is None:
            return {**found, _SAVED: None}
        self._outstanding.step = None
        return {**found, _SAVED: saving.saved(pending, pending.use, self._kept, self.pieces)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned, after the model and the optimizer have loaded theirs."""
        super().load_state_dict(state)
        self._fresh, self._pending = None, None
        if state[_SAVED] is None or self._state.world == 1:
            return
        self._pending = saving.load(state[_SAVED], self._kept, self.pieces)
        self._outstanding.step = self._pending.step

    def report(self) -> DuoReport:
        """Returns what this rank has sent so far on both ways, how long that took, and what became of steps."""
        return DuoReport(
            **vars(super().report()),
            slow=replace(self._slow.tally),
            ahead=replace(self._ahead),
            outstanding=self._pending is not None,
        )

    def statement(self) -> dict[str, list[str]]:
        """Returns what all ranks have to agree on before they send each other anything."""
        return {
            **super().statement(),
            "optimizer": [*pure.described(self._optimizer), f"scaler: {self._scaler is not None}"],
        }

    def _begin(self, step: int) -> Replica:
        if self._joins():
            raise OptionError(
                "DUO needs a step of every rank's optimizer for each of its gradients, and under join a rank without data takes none",
                where="ddp.join()",
                do="give all ranks the same number of batches, or train with a codec in place of DUO",
            )
        self._drop_unused()
        fresh = self._fresh = Replica(step)

        def note() -> None:
            fresh.versions = versions(p.grad for p in self._parameters)

        # DistributedDataParallel writes gradients in a callback of its own, and this one comes after it.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(note))
        return fresh

    def _keep(self, fresh: Replica, bucket: Any) -> None:
        buffer, gradients, index = bucket.buffer(), bucket.gradients(), int(bucket.index())
        values = self._memory.take(buffer.numel()).copy_(buffer)
        views = geometry.views(values, buffer, gradients)
        places = [self._places[id(p)] for p in bucket.parameters()]
        fresh.buckets.append(Kept(index, values, [self._plain[place] for place in places], views))
        fresh.gradients |= dict(zip(places, views, strict=True))
        fresh.means |= dict(zip(places, gradients, strict=True))

    def _close(self, fresh: Replica) -> Tensor:
        scales = self._scaler is not None and self._scaler.is_enabled()
        # As a GradScaler makes it of its scale.
        fresh.close(float(torch.tensor(self._scaler.get_scale()).double().reciprocal().float()) if scales else None)
        return torch.empty(0)

    def _drop_unused(self) -> None:
        """Leaves gradients out that no step has used, as a GradScaler does that finds an infinity."""
        if self._fresh is None:
            return
        if self._fresh.finite:
            raise OptionError(
                "the gradients of a backward pass were averaged, and no step of the optimizer has used them",
                where=f"step {self._fresh.step} of DUO",
                do="accumulate gradients under ddp.no_sync(), as DUO keeps those of one backward pass; where they are not to be used, "
                "say so: handle.skip()",
            )
        self._ahead.skipped += 1
        self._memory.give(self._fresh)
        self._fresh = None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping:
            return
        if args[1:] or any(value is not None for value in kwargs.values()):
            raise OptionError(
                "a step of the optimizer was given arguments, as a closure, and DUO takes it again without them",
                where="optimizer.step(...)",
                do="call the backward pass before, and optimizer.step() without arguments",
            )
        self.wait()
        fresh = self._fresh
        if fresh is None:
            if any(p.grad is not None for p in self._parameters):
                raise OptionError(
                    "the optimizer steps with gradients that were not averaged since it did so last",
                    where="optimizer.step()",
                    do="call it once after each backward pass that is not under ddp.no_sync()",
                )
            return
        use, infinite = self._use(fresh)
        if infinite:
            fresh.finite = False
            self._drop_unused()
            return
        self._commit(fresh.begun)
        for kept, p in zip(self._kept, self._parameters, strict=True):
            kept.copy_(p.detach())
        fresh.use, self._fresh, self._pending = use, None, fresh
        self._outstanding.step = fresh.step
        self._saved = pure.state(optimizer)
        if not self._looks_ahead:
            self._put_aside = [p.grad for p in self._parameters]
            for p in self._parameters:
                p.grad = None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping or self._saved is None or self._pending is None:
            return
        pure.put_back(optimizer, self._saved)
        if self._put_aside is not None:
            for p, gradient in zip(self._parameters, self._put_aside, strict=True):
                p.grad = gradient
        self._saved = self._put_aside = None
        pending = self._pending
        self._worker.submit(lambda: self._reduce_in_full(pending))

    def _use(self, fresh: Replica) -> tuple[Use, bool]:
        """Returns what the optimizer was to make of gradients, and whether they are to be left out."""
        scale, infinite = pure.scaling(self._optimizer)
        gradients = [p.grad for p in self._parameters]
        factor = fresh.factor_found(gradients)
        if factor is None:
            raise OptionError(
                "gradients were changed between the backward pass and the step, and DUO cannot do the same to those in full precision",
                where=f"step {fresh.step} of DUO",
                do="have the optimizer change them, as it is called for both: after compress(...), call "
                "optimizer.register_step_pre_hook(clip) with a function clip(*_) that calls clip_grad_norm_ and returns nothing; "
                "a GradScaler is given to compress(..., scaler=scaler)",
            )
        used = [g is not None for g in gradients]
        use = Use(pure.settings(self._optimizer), used, factor, scale, factor != 1.0 or scale is not None)
        return use, infinite

    def _commit(self, since: float) -> None:
        """Takes the parameters and the state on by the gradients in full of the step before; `since` then they have been waited for."""
        pending = self._pending
        if pending is None or pending.use is None:
            return
        use = pending.use
        self._ahead.waited += max(0.0, pending.known - since)
        present = [p.grad for p in self._parameters]
        with torch.no_grad():
            for place, (p, kept) in enumerate(zip(self._parameters, self._kept, strict=True)):
                p.copy_(kept)
                p.grad = self._gradient(pending, place) if use.used[place] else None
        if use.scaled and not finite(p.grad for p in self._parameters if p.grad is not None):
            self._ahead.skipped += 1
            warnings.warn(
                f"the gradients of step {pending.step} in full precision are not finite, though they were in {self.assigned.name}: "
                "the step is left out",
                stacklevel=4,
            )
        else:
            with (
                self._taking_a_step(),
                pure.under(self._optimizer, use.groups),
                pure.scaled_by(self._optimizer, use.scale),
            ):
                pure.step(self._optimizer)
            self._ahead.committed += 1
        for p, gradient in zip(self._parameters, present, strict=True):
            p.grad = gradient
        self._memory.give(pending)
        self._pending, self._outstanding.step = None, None

    def _gradient(self, pending: Replica, place: int) -> Tensor:
        p, mean = self._parameters[place], pending.gradients[place]
        found = mean if p.dtype == mean.dtype else mean.to(p.dtype)
        factor = 1.0 if pending.use is None else pending.use.factor
        return found if factor == 1.0 else found.mul_(factor)

    @contextlib.contextmanager
    def _taking_a_step(self) -> Iterator[None]:
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _reduce_in_full(self, pending: Replica) -> Tensor:
        slow, checks = self._slow, self._checks(pending.step)
        with torch.no_grad():
            for bucket in pending.buckets:
                slow.reduce(Bucket(bucket.index, pending.step, bucket.values, bucket.pieces, bucket.gradients, checks))
        slow.settle(pending.step)
        pending.known = time.perf_counter()
        return torch.empty(0)
