"""Comm hook of DistributedDataParallel that compresses gradients, and its handle.

Invariant: the result of a step depends only on its gradients, the codec, the error feedback, the
seed and the step, and not on thread timing or buckets.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qsync_fx.communication import bucket as geometry
from qsync_fx.communication.allreduce import (
    Hierarchy,
    NodeGroups,
    Reducer,
    coded_names,
    layout,
)
from qsync_fx.communication.aqgb import AqgbEntry, Controller, Gatherer
from qsync_fx.communication.bucket import Bucket, threshold
from qsync_fx.communication.codecs import PLAIN, codec_named, first_on_host
from qsync_fx.communication.codecs.codec import Codec
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.collective import CollectiveGroups
from qsync_fx.communication.communication_thread import Worker
from qsync_fx.communication.compressor_state import (
    CompressorHandle,
    CompressorState,
    is_scaled,
    scale_of,
)
from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.statistics import Report
from qsync_fx.errors import OptionError, PlanError, shown
from qsync_fx.plan.cluster_plan import levels_of
from qsync_fx.torch_internals import _execution_engine


@dataclass(frozen=True)
class Assigned:
    """Codec of each parameter's gradient, in model order."""

    name: str  # for reports
    signature: str  # what ranks compare
    text: str  # identity for message headers and saved states
    codecs: tuple[Codec, ...]
    coded: tuple[bool, ...]  # whether the codec is not FP32
    inside: tuple[Codec, ...]  # codecs inside nodes

    @property
    def adaptive(self) -> Adaptive | None:
        """The AQGB codec that chooses levels during training; None if all codecs are fixed."""
        return next((codec for codec in self.codecs if isinstance(codec, Adaptive)), None)


def to_all(codec: Codec, sizes: Sequence[int], least: int | None = None) -> Assigned:
    """Return one codec for parameters with at least `least` values; see `bucket.threshold`."""
    if least is None:
        least = threshold(sizes)
    coded = tuple(size >= least for size in sizes)
    codecs = tuple({True: codec, False: PLAIN}[item] for item in coded)
    return Assigned(codec.name, repr(codec), repr(codec), codecs, coded, (PLAIN,) * len(sizes))


def by_plan(planned: Mapping[str, str], names: Sequence[str]) -> Assigned:
    """Return the codecs of a plan; raise `PlanError` if it names an unknown parameter."""
    for name in planned:
        if name not in names:
            description = (
                f"the plan codes {shown(name)}, which is not a trained parameter of the model"
            )
            do = "use a plan of this model, whose parameters have other names"
            raise PlanError(description, where="codecs", do=do)
    levels = [levels_of(planned.get(name, PLAIN.name)) for name in names]
    codecs = tuple(codec_named(name) for name, _ in levels)
    inside = tuple(codec_named(name) for _, name in levels)
    coded = tuple(codec != PLAIN for codec in codecs)
    kinds = " and ".join(sorted({*planned.values()} - {PLAIN.name}))
    text = "\n".join(
        f"{name} {codec!r}" if local == PLAIN else f"{name} {codec!r}, {local!r} inside"
        for name, codec, local in zip(names, codecs, inside, strict=True)
    )
    identity = f"the codecs of a plan ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
    called = f"a plan's {kinds}" if kinds else "a plan without codecs"
    return Assigned(called, called, identity, codecs, coded, inside)


class DdpCompressor(CompressorHandle):
    """Compressor of a DistributedDataParallel; with `nodes`, it reduces in two levels."""

    _unit = 1  # of values at which parameters may be cut, in addition to the codec's unit

    def __init__(
        self,
        group: Any,
        rank: int,
        world: int,
        named: Sequence[tuple[str, nn.Parameter]],
        assigned: Assigned,
        seed: int,
        check_every: int,
        scaler: Any = None,
        nodes: NodeGroups | None = None,
        collectives: CollectiveGroups | None = None,
    ) -> None:
        self.assigned, self.nodes = assigned, nodes
        self.names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._places = {id(p): index for index, p in enumerate(self._parameters)}
        self.pieces = self._pieces(assigned, world)
        self._register: Callable[[], None] | None = None
        device = next((p.device for p in self._parameters), CPU)
        adaptive, members = assigned.adaptive, tuple[int, ...]()
        text = self._identity(assigned)
        if nodes is not None:
            members = nodes.across(rank)
        # AQGB codes on the host, where the progress of the bytes is known.
        self._state = CompressorState(rank, world, text, seed, device if adaptive is None else CPU)
        groups = collectives or CollectiveGroups()
        self._reducer = Reducer(group, self._state, members, groups.coded)
        self._hierarchy = None
        if nodes is not None:
            self._hierarchy = Hierarchy(nodes, self._reducer, groups.inside)
        self.controller: Controller | None = None
        self._gatherer: Gatherer | None = None
        if adaptive is not None:
            self.controller = Controller(adaptive.grace, adaptive.elapsed)
            self._gatherer = Gatherer(adaptive, self._reducer, self.controller)
        self._transport = str(self._reducer.transport)
        if (hosted := first_on_host(assigned.codecs)) is not None:
            self._transport += f", as {hosted} is encoded in host memory"
        self._worker = Worker("qsync communication", device, blocking=collectives is None)
        self._check_every, self._watched = check_every, -1
        self._loss_scaler, self._scale, self._undone = scaler, 1.0, False

    def hook(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket asynchronously; DDP calls it in the same bucket order on all ranks."""
        buffer: Tensor = bucket.buffer()
        step, last, index = self._state.step, bool(bucket.is_last()), int(bucket.index())
        self._watch(step)
        self._state.step += last
        pieces = [self.pieces[self._places[id(parameter)]] for parameter in bucket.parameters()]
        gradients, submitted = bucket.gradients(), time.perf_counter()
        scale, undone = self._scale, self._undone
        if self.controller is not None and self._state.world > 1:
            self.controller.came(step, PLAIN.nbytes(buffer.numel()))

        def work() -> Tensor:
            self._reducer.tally.wait += time.perf_counter() - submitted
            self._state.begin(scale, undone)
            with torch.no_grad():
                if self._state.world > 1:
                    values = buffer.to(self._state.device, torch.float32)
                    views = geometry.views(values, buffer, gradients)
                    checks = self._checks(step)
                    self._average(Bucket(index, step, values, pieces, views, checks))
                    if values is not buffer:
                        buffer.copy_(values)
                    if undone:
                        self._reducer.require_finite(buffer)
                if last:
                    self._reducer.settle(step, compared=self._checks(step))
            return buffer

        future: torch.futures.Future[Tensor] = self._worker.submit(work)
        return future

    # DDP compares annotations with classes, but postponed annotations are strings.
    hook.__annotations__.clear()

    def attach(self, register: Callable[[], None]) -> None:
        """Register the hook once a parameter is coded; `register` adds it to the DDP module."""
        codecs = (*(piece.codec for piece in self.pieces), *self.assigned.inside)
        for codec in dict.fromkeys(codecs):
            codec.prepare(self._state.device)
        self._register = register
        self._register_if_coded()

    def change(self, assigned: Assigned) -> None:
        """Change the codecs between two steps, at the same step on all ranks.

        Old error feedback is sent with the next gradients. Raise `OptionError` if not supported.
        """
        self.wait()
        adapts = self.controller is not None or assigned.adaptive is not None
        if adapts:
            description = "AQGB cannot change during training, as it chooses its own bits"
            do = "use another codec, or train without replanning"
            raise OptionError(description, where="codecs", do=do)
        hosted = first_on_host(assigned.codecs)
        if hosted is not None and self._reducer.transport.on_device:
            description = f"{hosted} is encoded in host memory, but gradients stay on the device"
            do = 'pass transport="point_to_point" to compress, or plan without this codec'
            raise OptionError(description, where="codecs", do=do)
        pieces = self._pieces(assigned, self._state.world)
        changes = [
            (old, new, parameter.detach().float())
            for old, new, parameter in zip(self.pieces, pieces, self._parameters, strict=True)
            if old.codec != new.codec
        ]
        with torch.no_grad():
            if changes and self._hierarchy is not None:
                self._hierarchy.recode(changes, self._state.step)
            elif self._hierarchy is None:
                for change in changes:
                    self._state.recode(*change)
        self.assigned, self.pieces = assigned, pieces
        self._state.codec = self._identity(assigned)
        self._register_if_coded()

    def _identity(self, assigned: Assigned) -> str:
        if self.nodes is None:
            return assigned.text
        text = f"{assigned.text} between nodes of {self.nodes.size} ranks"
        names = coded_names(assigned.inside)
        return f"{text}, {names} inside" if names else text

    def _register_if_coded(self) -> None:
        if self._register is not None and any(self.assigned.coded):
            register, self._register = self._register, None
            register()

    def _pieces(self, assigned: Assigned, world: int) -> tuple[geometry.ParameterSlice, ...]:
        levels = zip(assigned.codecs, assigned.inside, strict=True)
        parameters = zip(self.names, self._parameters, levels, strict=True)
        return tuple(
            replace(geometry.piece(name, index, p.shape, codec, world, self._unit), inside=inside)
            for index, (name, p, (codec, inside)) in enumerate(parameters)
        )

    def wait(self) -> None:
        if self.controller is not None:
            self.controller.needed()
        self._worker.wait()

    def decisions(self) -> tuple[AqgbEntry, ...]:
        """Return AQGB's decisions, oldest first; empty for other codecs."""
        return () if self.controller is None else tuple(self.controller.log)

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        if self.controller is not None:
            self._state.control = self.controller.saved()
        return self._state.saved()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.wait()
        pieces: Sequence[geometry.ParameterSlice] = self.pieces
        if self._hierarchy is not None:
            pieces = [self._hierarchy.share(piece) for piece in pieces]
        self._state.load(state, pieces)
        if self.controller is not None:
            self.controller.load(self._state.control)

    def report(self) -> Report:
        size, state = sum(piece.size for piece in self.pieces), self._state
        both = zip(self.pieces, self.assigned.coded, strict=True)
        coded = sum(piece.size for piece, is_coded in both if is_coded)
        tally, adapted = replace(self._reducer.tally), None
        if self.controller is not None:
            adapted = self.controller.adapted()
        return Report(
            self.assigned.name,
            state.rank,
            state.world,
            coded,
            size - coded,
            tally,
            adapted,
            transport=self._transport,
            inside=" and ".join(sorted({codec.name for codec in self.assigned.inside})),
        )

    def statement(self) -> dict[str, list[str]]:
        codec = [self.assigned.signature, f"compared every {self._check_every} steps"]
        if self._loss_scaler is not None:
            codec.append("with the scale of a GradScaler")
        return {
            "gradient codec": codec,
            "node layout": [layout(self.nodes, self.assigned.inside)],
            "transport": [self._reducer.transport.name],
            "gradient seed": [str(self._state.seed)],
            "tensor codec": [str(piece) for piece in self.pieces],
        }

    def _watch(self, step: int) -> None:
        """Make the backward pass of this step wait for its reductions and raise their error."""
        if self._watched == step:
            return
        self._watched, self._scale = step, scale_of(self._loss_scaler)
        # Only error feedback depends on whether the optimizer step is skipped.
        feedback = bool(self._state.sent.values) or any(p.codec.residual for p in self.pieces)
        self._undone = feedback and is_scaled(self._loss_scaler)
        try:
            _execution_engine.queue_callback(self.wait)
        except RuntimeError:
            # Under `join`, a rank without data has no backward pass; its future raises the error.
            return

    def _average(self, bucket: Bucket) -> None:
        (self._gatherer or self._hierarchy or self._reducer).reduce(bucket)

    def _checks(self, step: int) -> bool:
        # AQGB chooses levels from the second step on, so that step is measured too.
        first = self.controller is not None and step == 1
        return self._check_every > 0 and (first or step % self._check_every == 0)
