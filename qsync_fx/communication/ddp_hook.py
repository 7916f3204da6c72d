"""A training whose gradients are compressed: the hook of DistributedDataParallel, and what a user holds of it.

Invariant: what a step makes of gradients depends on them, the codec, the seed and the step, and on no order of threads, no buckets and no
step before but by what codecs have left. The hook never waits; the backward pass does, at its end.

Which codec the gradient of each parameter is sent in: one for all that are large enough, or as a plan says.

Invariant: `text` tells two assignments apart, so that ranks and saved states that agree on it code alike.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsync_fx.communication import bucket, statistics
from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.aqgb.allgather import Gatherer
from qsync_fx.communication.aqgb.controller import AqgbEntry, Controller
from qsync_fx.communication.bucket import Bucket, threshold
from qsync_fx.communication.codecs import PLAIN, codec_named
from qsync_fx.communication.codecs.codec import Codec
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.communication_thread import Worker
from qsync_fx.communication.compressor_state import CompressorHandle, CompressorState
from qsync_fx.communication.error_feedback import CPU, finite, scale_of
from qsync_fx.communication.hierarchical import Hierarchy, NodeGroups
from qsync_fx.errors import OptionError, PlanError, shown


@dataclass(frozen=True)
class Assigned:
    """
    Attributes:
        name: what reports call it.
        said: the same at length, as ranks compare it.
        text: what messages and saved states are of.
        codecs: of each parameter, in the order of the model.
        coded: which of them are coded; others are small, or are to go in FP32.
    """

    name: str
    said: str
    text: str
    codecs: tuple[Codec, ...]
    coded: tuple[bool, ...]

    @property
    def adaptive(self) -> Adaptive | None:
        """AQGB, where it chooses levels as training goes on; None where all is said beforehand, as it is in a plan."""
        return next((codec for codec in self.codecs if isinstance(codec, Adaptive)), None)


def to_all(codec: Codec, sizes: Sequence[int], least: int | None = None) -> Assigned:
    """Returns one codec for all parameters of `least` values or more; by default so that more than 99% of all values are coded."""
    least = threshold(sizes) if least is None else least
    coded = tuple(size >= least for size in sizes)
    return Assigned(
        codec.name,
        repr(codec),
        repr(codec),
        tuple(codec if item else PLAIN for item in coded),
        coded,
    )


def by_plan(planned: Mapping[str, str], names: Sequence[str]) -> Assigned:
    """Returns what a plan says; raises `PlanError` where it names a parameter that there is not."""
    for name in planned:
        if name not in names:
            message = f"the plan has a codec for the gradient of {shown(name)}, which the model does not train"
            raise PlanError(
                message,
                where="codecs",
                do="find the plan of this model: its parameters have other names",
            )
    codecs = tuple(codec_named(planned.get(name, PLAIN.name)) for name in names)
    kinds = " and ".join(sorted({codec.name for codec in codecs if codec != PLAIN}))
    text = "\n".join(f"{name} {codec!r}" for name, codec in zip(names, codecs, strict=True))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    called = f"a plan's {kinds}" if kinds else "a plan without codecs"
    return Assigned(
        called,
        called,
        f"the codecs of a plan ({digest})",
        codecs,
        tuple(codec != PLAIN for codec in codecs),
    )


class DdpCompressor(CompressorHandle):
    """What `qsync_fx.distributed.compress` returns for a DistributedDataParallel.

    Args:
        scaler: the GradScaler that scales the loss, if there is one.
        nodes: which ranks share a node, inside of which gradients go in FP32; None for a codec between all ranks.

    Attributes:
        assigned: what gradients are sent in.
        pieces: what becomes of each parameter, in the order of the model.
        nodes: as given.
        controller: what chooses AQGB's levels; None for other codecs.
    """

    _unit = 1
    """Between how many values parameters may be cut, beside what codecs ask for."""

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
    ) -> None:
        self.assigned = assigned
        self._named = tuple(named)
        self.pieces = self._pieces(assigned, world)
        self._register: Callable[[], None] | None = None
        self._places = {id(p): index for index, (_, p) in enumerate(named)}
        self._parameters = [p for _, p in named]
        self.nodes = nodes
        # AQGB's levels follow the link as bytes are made: they are made on the host, whose bytes say how far it has come.
        lies = self._parameters[0].device if self._parameters else CPU
        self._state = CompressorState(
            rank, world, self._text(assigned), seed, CPU if assigned.adaptive is not None else lies
        )
        self._reducer = Reducer(group, self._state, () if nodes is None else nodes.across(rank))
        self._hierarchy = None if nodes is None else Hierarchy(nodes, self._reducer)
        self.controller: Controller | None = None
        self._gatherer: Gatherer | None = None
        if (adaptive := assigned.adaptive) is not None:
            self.controller = Controller(adaptive.grace, adaptive.elapsed)
            self._gatherer = Gatherer(adaptive, self._reducer, self.controller)
        self._worker = Worker("qsync communication", lies)
        self._check_every = check_every
        self._watched = -1
        self._loss_scaler, self._scale = scaler, 1.0

    def hook(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """The communication hook; DistributedDataParallel calls it with each bucket, in the same order on all ranks."""
        buffer: Tensor = bucket.buffer()
        step, last = self._state.step, bool(bucket.is_last())
        self._watch(step)
        self._state.step += last
        if last:
            self._buckets = int(bucket.index()) + 1
        pieces = [self.pieces[self._places[id(parameter)]] for parameter in bucket.parameters()]
        gradients, index, inputs, scale = (
            bucket.gradients(),
            int(bucket.index()),
            time.perf_counter(),
            self._scale,
        )
        if self.controller is not None and self._state.world > 1:
            self.controller.came(step, PLAIN.nbytes(buffer.numel()))

        def work() -> Tensor:
            self._reducer.tally.wait += time.perf_counter() - inputs
            self._state.begin(scale)
            with torch.no_grad():
                self._reduce(index, step, buffer, pieces, gradients)
                if last:
                    self._reducer.settle(step, compared=self._checks(step))
            return buffer

        future: torch.futures.Future[Tensor] = self._worker.submit(work)
        return future

    # DistributedDataParallel compares annotations with classes, and these are texts.
    hook.__annotations__.clear()

    def attach(self, register: Callable[[], None]) -> None:
        """Has the hook called: `register` gives it to DistributedDataParallel, once something is to be coded."""
        for codec in dict.fromkeys(piece.codec for piece in self.pieces):
            codec.prepare(self._state.device)
        self._register = register
        self._registered()

    @property
    def names(self) -> list[str]:
        """Of the parameters, in the order of the model."""
        return [name for name, _ in self._named]

    def change(self, assigned: Assigned) -> None:
        """Sends gradients in other codecs from the next step on, on all ranks between the same two. What codecs have left of gradients is
        sent with the next ones.

        Raises:
            OptionError: levels are chosen while gradients come, before or after.
        """
        self.wait()
        if self.nodes is not None:
            raise OptionError(
                "codecs between nodes are not changed in the middle of training",
                where="codecs",
                do="leave out hierarchical, or replanning",
            )
        if self.controller is not None or assigned.adaptive is not None:
            raise OptionError(
                "AQGB chooses levels by itself, and is not changed for another codec in the middle of training",
                where="codecs",
                do="train with codecs that a plan may name",
            )
        pieces = self._pieces(assigned, self._state.world)
        for old, new, parameter in zip(self.pieces, pieces, self._parameters, strict=True):
            if old != new:
                self._state.recode(old, new, parameter.detach().float())
        self.assigned, self.pieces, self._state.codec = assigned, pieces, assigned.text
        self._registered()

    def _registered(self) -> None:
        if self._register is not None and any(self.assigned.coded):
            register, self._register = self._register, None
            register()

    def _text(self, assigned: Assigned) -> str:
        """Returns what messages and saved states are of."""
        return (
            assigned.text
            if self.nodes is None
            else f"{assigned.text} between nodes of {self.nodes.size} ranks"
        )

    def _pieces(self, assigned: Assigned, world: int) -> tuple[bucket.ParameterSlice, ...]:
        return tuple(
            bucket.piece(name, index, p.shape, codec, world, self._unit)
            for index, ((name, p), codec) in enumerate(
                zip(self._named, assigned.codecs, strict=True)
            )
        )

    def wait(self) -> None:
        """Returns when all buckets that were given are reduced.

        Raises:
            RankError: a rank is gone, or a message could not be read.
        """
        if self.controller is not None:
            self.controller.needed()
        self._worker.wait()

    def decisions(self) -> tuple[AqgbEntry, ...]:
        """Returns what AQGB has decided when gradients came, the newest last; nothing for other codecs."""
        return () if self.controller is None else tuple(self.controller.log)

    def state_dict(self) -> dict[str, Any]:
        """Returns what it takes to go on with the same bits: what codecs have left of gradients, the seed and the step. Each rank saves
        its own."""
        self.wait()
        if self.controller is not None:
            self._state.control = self.controller.saved()
        return self._state.saved()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned on this rank. On another one, or among more or fewer, it warns, and what codecs had left
        is dropped.

        Raises:
            OptionError: it is of another codec or another model.
        """
        self.wait()
        pieces = (
            self.pieces
            if self._hierarchy is None
            else [self._hierarchy.share(piece) for piece in self.pieces]
        )
        self._state.load(state, pieces)
        if self.controller is not None:
            self.controller.load(self._state.control)

    def report(self) -> statistics.Report:
        """Returns what this rank has sent so far, how long that took, and what it changed."""
        coded = sum(
            piece.size for piece, item in zip(self.pieces, self.assigned.coded, strict=True) if item
        )
        plain = sum(piece.size for piece in self.pieces) - coded
        state = self._state
        adapted = None if self.controller is None else self.controller.adapted()
        return statistics.report(
            self.assigned.name, state.rank, state.world, coded, plain, self._reducer.tally, adapted
        )

    def statement(self) -> dict[str, list[str]]:
        """Returns what all ranks have to agree on before they send each other anything."""
        return {
            "codec of gradients": [
                self.assigned.said,
                f"compared every {self._check_every} steps",
                *(["with the scale of a GradScaler"] if self._loss_scaler is not None else []),
            ],
            "nodes of ranks": ["none" if self.nodes is None else str(self.nodes)],
            "seed of gradients": [str(self._state.seed)],
            "coding of tensors": [
                f"{piece.name}: {piece.size} values by {piece.codec!r}" for piece in self.pieces
            ],
        }

    def _watch(self, step: int) -> None:
        """Has the backward pass of this step end with what goes wrong, as the error that it is."""
        if self._watched == step:
            return
        self._watched, self._scale = step, scale_of(self._loss_scaler)
        # What is left of gradients alone depends on whether a step is taken.
        leaves = bool(self._state.sent.values) or any(piece.codec.residual for piece in self.pieces)
        self._state.undone = (
            leaves and self._loss_scaler is not None and self._loss_scaler.is_enabled()
        )
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        except RuntimeError:
            # A rank that has no more data (`join`) has no backward pass either: its error is that of the future.
            return

    def _reduce(
        self,
        index: int,
        step: int,
        buffer: Tensor,
        pieces: Sequence[bucket.ParameterSlice],
        gradients: Sequence[Tensor],
    ) -> None:
        state = self._state
        if state.world == 1:
            return
        values = buffer.to(state.device, torch.float32)
        views = bucket.views(values, buffer, gradients)
        self._average(Bucket(index, step, values, pieces, views, self._checks(step)))
        if values is not buffer:
            buffer.copy_(values)
        if state.undone:
            self._reducer.finite &= finite(buffer)

    def _average(self, bucket: Bucket) -> None:
        (self._gatherer or self._hierarchy or self._reducer).reduce(bucket)

    def _checks(self, step: int) -> bool:
        # AQGB's levels are chosen from the second step on: what they add is told before the next hundred steps are over.
        first = self.controller is not None and step == 1
        return self._check_every > 0 and (first or step % self._check_every == 0)
