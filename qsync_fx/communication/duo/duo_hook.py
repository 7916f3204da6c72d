"""DUO's comm hook of DistributedDataParallel, and its handle.

The hook copies each bucket, on a GPU to host memory, then reduces it in few bits. After the
optimizer's lookahead step, the single communication thread reduces the copies in FP32 on the CPU,
during the next forward and backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.communication import bucket as geometry
from qsync_fx.communication.allreduce import NodeGroups, Reducer
from qsync_fx.communication.bucket import Bucket
from qsync_fx.communication.codecs import PLAIN, Codec
from qsync_fx.communication.collective import CollectiveGroups
from qsync_fx.communication.compressor_state import is_scaled
from qsync_fx.communication.ddp_hook import Assigned, DdpCompressor
from qsync_fx.communication.duo import functional_optimizer, optimizer_steps
from qsync_fx.communication.duo.offload import Offload
from qsync_fx.communication.duo.optimizer_parameters import ReplicatedParameters, ShardedParameters
from qsync_fx.communication.duo.optimizer_steps import Outstanding, PendingStep, Steps, versions
from qsync_fx.communication.duo.sign_codecs import Duo
from qsync_fx.communication.statistics import DuoReport
from qsync_fx.errors import OptionError
from qsync_fx.torch_internals import _execution_engine

_SAVED: Final = "duo"


class DuoCompressor(DdpCompressor):
    """DUO compressor of a DistributedDataParallel.

    `joins` returns whether the model trains under `join`; `weights` are the codecs of shards.
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
        duo: Duo,
        optimizer: Optimizer,
        scaler: Any,
        joins: Callable[[], bool],
        weights: Sequence[Codec] | None = None,
        nodes: NodeGroups | None = None,
        collectives: CollectiveGroups | None = None,
    ) -> None:
        self._weight_codecs, self._weight_kinds = weights, "no"
        if weights is not None:
            self._weight_kinds = ", ".join(sorted({repr(codec) for codec in weights}))
            # Gradients and parameters of all codecs need the same shards.
            units = [codec.unit for codec in {*assigned.codecs, *weights}]
            self._unit = math.lcm(functional_optimizer.ALIGNED, *units)
        settings = group, rank, world, named, assigned, seed, check_every
        super().__init__(*settings, nodes=nodes, collectives=collectives)
        self._optimizer, self._scaler, self._joins = optimizer, scaler, joins
        is_active = self._state.device.type == "cuda" if duo.offload is None else duo.offload
        size = sum(piece.size for piece in self.pieces)
        self._memory = Offload(self._state.device, size, is_active)
        slow = self._state.like(f"in full: {assigned.text}")
        self._slow = Reducer(group, replace(slow, device=self._memory.host))
        self._copied: dict[int, Any] = {}  # events: buckets of this index may be overwritten
        self._plain = tuple(replace(piece, codec=PLAIN) for piece in self.pieces)
        self._optimized = self._optimized_parameters(group)
        self._outstanding = Outstanding(self, rank)
        self._steps = Steps(
            optimizer,
            self._optimized,
            self._memory,
            duo.ahead,
            self._outstanding,
            self.wait,
            self._after_lookahead,
        )

    def follow(self) -> None:
        """Hook into the optimizer's steps; call it once, after all ranks have agreed."""
        if self._state.world > 1:
            self._optimized.take(self._optimizer)
            self._steps.follow()

    def hook(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        if self._state.world == 1:
            return super().hook(state, bucket)
        step, last = self._state.step, bool(bucket.is_last())
        averaged = self._steps.averaged
        if averaged is None or averaged.step != step:
            averaged = self._begin(step)
        self._copy(averaged, bucket)
        reduced = super().hook(state, bucket)
        if last:
            self._worker.submit(lambda: self._close(averaged))
        return reduced

    # DDP compares annotations with classes, but postponed annotations are strings.
    hook.__annotations__.clear()

    def flush(self) -> None:
        """Commit the pending gradients in full precision.

        Call it before evaluation, before saving parameters for use and at the end of training. With
        a sharded optimizer, all ranks call it together.
        """
        begun = time.perf_counter()
        self.wait()
        self._steps.drop_unused()
        if self._steps.commit(begun):
            self._optimized.show_exactly(self._state.step)

    def skip(self) -> None:
        """Drop the gradients of the last backward pass on all ranks, unless they are non-finite."""
        self.wait()
        if self._steps.averaged is not None:
            self._steps.averaged.finite = False
            self._steps.drop_unused()

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale the gradients to a 2-norm, over all shards, of at most `limit`; return the old one.

        Call it from a step pre-hook of the optimizer, on all ranks: the hook runs for both steps.
        """
        return self._optimized.clip(limit, self._state.step)

    def whole_optimizer_state(self) -> dict[str, Any]:
        """Flush, and return the optimizer's state for full parameters, as without shards.

        To resume with another world size, load it into an optimizer before `compress`. With a
        sharded optimizer, all ranks call it together.
        """
        self.flush()
        return self._optimized.whole_state(self._optimizer, self._state.step)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a bit-identical resume, with the pending gradients.

        Save it with the states of the model and the optimizer.
        """
        result = super().state_dict()
        self._steps.drop_unused()
        result[_SAVED] = None
        if (pending := self._steps.pending) is not None:
            self._outstanding.step = None
            self._memory.synchronize()
            result[_SAVED] = optimizer_steps.saved(pending, self._optimized.committed, self.pieces)
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, after the model and the optimizer have loaded their states."""
        if self._optimized.sharded:
            optimizer_steps.check_rank(state, self._state.rank, self._state.world)
        super().load_state_dict(state)
        self._steps.restore(None)
        if self._state.world == 1:
            return
        if (saved := state[_SAVED]) is None:
            self._optimized.reload()
        else:
            committed = self._optimized.committed
            self._steps.restore(optimizer_steps.load(saved, committed, self.pieces))

    def report(self) -> DuoReport:
        parameters = self._optimized.tally
        return DuoReport(
            **vars(replace(super().report(), replicated=not self._optimized.sharded)),
            slow=replace(self._slow.tally),
            ahead=replace(self._steps.statistics),
            outstanding=self._steps.pending is not None,
            parameters=parameters and replace(parameters),
            state_bytes=self._optimized.nbytes(self._optimizer),
            bridge=self._memory.bridge_nbytes if self._memory.active else None,
        )

    def statement(self) -> dict[str, list[str]]:
        optimizer = functional_optimizer.described(self._optimizer)
        scaler, sharded = f"scaler: {self._scaler is not None}", f"sharded: {self._weight_kinds}"
        return {**super().statement(), "optimizer": [*optimizer, scaler, sharded]}

    def _begin(self, step: int) -> PendingStep:
        if self._joins():
            text = "DUO needs a step on every rank, but under join() a rank without data makes none"
            do = "use the same number of batches on all ranks, or a codec instead of DUO"
            raise OptionError(text, where="ddp.join()", do=do)
        averaged = self._steps.begin(step)

        def record_versions() -> None:
            self._worker.wait()  # closes the fast reduction
            self._optimized.pass_gradients(averaged.finite or averaged.factor is None)
            averaged.versions = versions(p.grad for p in self._optimized.stepped)
            averaged.aside = versions(self._optimized.aside())

        # DDP writes gradients in its own callback; the nested callback runs after it.
        engine: Any = _execution_engine
        engine.queue_callback(lambda: engine.queue_callback(record_versions))
        return averaged

    def _copy(self, averaged: PendingStep, bucket: Any) -> None:
        buffer, gradients, index = bucket.buffer(), bucket.gradients(), int(bucket.index())
        values = self._steps.buffer(buffer)
        self._copied[index] = self._memory.offload(buffer, values)
        views = geometry.views(values, buffer, gradients)
        places = [self._places[id(p)] for p in bucket.parameters()]
        pieces, checks = [self._plain[place] for place in places], self._checks(averaged.step)
        averaged.buckets.append(Bucket(index, averaged.step, values, pieces, views, checks))
        for place, view, gradient in zip(places, views, gradients, strict=True):
            averaged.gradients[place] = self._optimized.local_part(place, view)
            averaged.means[place] = self._optimized.local_part(place, gradient)

    def _close(self, averaged: PendingStep) -> Tensor:
        factor = None
        if is_scaled(self._scaler):
            # Rounded like the inverse scale of a GradScaler.
            factor = float(torch.tensor(self._scaler.get_scale()).double().reciprocal().float())
        averaged.close(factor, self._reducer.used)
        return torch.empty(0)

    def _after_lookahead(self, pending: PendingStep) -> None:
        self._optimized.show(pending.step, self._checks(pending.step))
        self._worker.submit(lambda: self._reduce_in_fp32(pending))

    def _reduce_in_fp32(self, pending: PendingStep) -> Tensor:
        self._memory.wait_offloaded()
        with torch.no_grad():
            for bucket in pending.buckets:
                self._optimized.reduce(self._slow, bucket)
        self._slow.settle(pending.step)
        pending.reduced_at = time.perf_counter()
        return torch.empty(0)

    def _average(self, bucket: Bucket) -> None:
        self._memory.wait(self._copied.pop(bucket.index))
        self._optimized.reduce(self._hierarchy or self._reducer, bucket)

    def _optimized_parameters(self, group: Any) -> ReplicatedParameters:
        world, weights = self._state.world, self._weight_codecs
        if weights is None or world == 1:
            return ReplicatedParameters(self._parameters, self._memory, keeps=world > 1)
        functional_optimizer.check(self._optimizer)
        both = zip(self.pieces, weights, strict=True)
        pieces = [replace(piece, codec=codec) for piece, codec in both]
        state = self._state.like(f"parameters in {self._weight_kinds}")
        return ShardedParameters(
            group, self._parameters, pieces, state, self._memory, self._run_now
        )

    def _run_now(self, work: Callable[[], Tensor]) -> Tensor:
        done = self._worker.submit(work)
        self._worker.wait()
        return done.value()  # type: ignore[no-any-return]
