"""Gradients of a model that is sharded by FSDP2, compressed where they are reduced and scattered.

FSDP hands over the gradients of one of its units at once, as one row for each rank: what that rank keeps of each parameter, one after the
other. Of parameters nothing is known there, so rows are coded as they lie: units of a codec go over the ends of parameters, but never over
those of rows. A rank sends each other rank its row, and sums the rows that it gets and its own, which is not coded, in the order of ranks.

Invariant: what a step makes of gradients depends on them, the codec, the seed and the step. A shard has one owner, so there are no replicas
to be kept equal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from qsync_fx.communication import point_to_point, statistics
from qsync_fx.communication.bucket import ParameterSlice
from qsync_fx.communication.codecs import PLAIN, Codec, buffers
from qsync_fx.communication.compressor_state import CompressorHandle, CompressorState
from qsync_fx.communication.error_feedback import CPU, finite, scale_of
from qsync_fx.communication.point_to_point import HEADER, MessageHeader, exchange
from qsync_fx.errors import QSyncError


@dataclass(frozen=True)
class FsdpUnit:
    """What FSDP reduces at once.

    Attributes:
        name: of the module that it is of; "" is the whole model.
        index: its place among the model's units.
        row: values that a rank keeps, with what fills up shards.
        rows: what becomes of each rank's row.
    """

    name: str
    index: int
    row: int
    rows: tuple[ParameterSlice, ...]


class ShardedCompression(CompressorHandle):
    """What `qsync_fx.distributed.compress` returns for a model that is sharded.

    Args:
        group: a process group that nobody else uses.
        sizes: the values of a row, by the name of the unit.
        least: units of fewer values go in FP32.
        scaler: the GradScaler that scales the loss, if there is one.

    Attributes:
        codec: what gradients are sent in.
        units: in the order of the model.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        world: int,
        sizes: Mapping[str, int],
        codec: Codec,
        seed: int,
        least: int,
        check_every: int,
        scaler: Any = None,
        device: torch.device = CPU,
    ) -> None:
        self.codec = codec
        self.units = tuple(
            FsdpUnit(
                name,
                index,
                row,
                _rows(name, index, row, codec if row * world >= least else PLAIN, world),
            )
            for index, (name, row) in enumerate(sizes.items())
        )
        self._buckets = len(self.units)
        self._group, self._check_every = group, check_every
        self._state = CompressorState(rank, world, f"sharded, {codec!r}", seed, device)
        self._tally = statistics.CommunicationStatistics()
        self._faults: list[str] = []
        self._begun, self._finite = False, True
        self._loss_scaler = scaler if codec.residual else None

    def wait(self) -> None:
        """Returns at once: a unit is reduced when FSDP asks for it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what it takes to go on with the same bits: what codecs have left of gradients, the seed and the step. Each rank saves
        its own."""
        return self._state.saved()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned on this rank. On another one, or among more or fewer, it warns, and what codecs had left
        is dropped.

        Raises:
            OptionError: it is of another codec or another model.
        """
        self._state.load(state, [piece for unit in self.units for piece in unit.rows])

    def report(self) -> statistics.Report:
        """Returns what this rank has sent so far, how long that took, and what it changed."""
        rank, world = self._state.rank, self._state.world
        coded = sum(unit.row * world for unit in self.units if unit.rows[0].codec == self.codec)
        plain = sum(unit.row * world for unit in self.units) - coded
        result = statistics.report(self.codec.name, rank, world, coded, plain, self._tally)
        return replace(result, replicated=False)

    def statement(self) -> dict[str, list[str]]:
        """Returns what all ranks have to agree on before they send each other anything."""
        return {
            "codec of gradients": [
                repr(self.codec),
                f"measured every {self._check_every} steps",
                *(["with the scale of a GradScaler"] if self._loss_scaler is not None else []),
            ],
            "seed of gradients": [str(self._state.seed)],
            "coding of tensors": [
                f"{unit.name}: rows of {unit.row} by {unit.rows[0].codec!r}" for unit in self.units
            ],
        }

    def scatter(self, unit: FsdpUnit) -> Scatter:
        """Returns what FSDP calls for a unit."""
        return Scatter(self, unit)

    def reduce(self, unit: FsdpUnit, output: Tensor, value: Tensor, op: Any) -> None:
        """Puts the sum, or the mean, of this rank's rows of all ranks into `output`.

        Raises:
            RankError: a rank is gone.
            QSyncError: the reduction is neither, or the codec keeps residuals and gradients of a parameter are not there.
        """
        state, step, row = self._state, self._state.step, output.numel()
        mean = _is_mean(op)
        self._watch()
        if row != unit.row:
            unit = self._smaller(unit, row)
        with torch.no_grad():
            rows = value.to(torch.float32).view(state.world, row)
            begin = time.perf_counter()
            mine = {
                peer: self._encoded(unit, peer, rows[peer])
                for peer in range(state.world)
                if peer != state.rank
            }
            encoded = time.perf_counter()
            theirs = {peer: buffers.host(self._length(unit), rows.device) for peer in mine}
            about = f"{unit.name or 'the model'} in step {step}"
            exchange(self._group, mine, theirs, about)
            received = time.perf_counter()
            total = torch.zeros(row, dtype=torch.float32, device=rows.device)
            for sender in range(state.world):
                if sender == state.rank:
                    total += rows[sender]
                elif (fault := self._head(unit, sender).fault(theirs[sender])) is not None:
                    self._faults.append(point_to_point.unread(state.rank, sender, about, fault))
                else:
                    unit.rows[state.rank].codec.decode(
                        buffers.taken_to(theirs[sender][HEADER:], total), total, add=True
                    )
            output.copy_(total.div_(state.world) if mean else total)
            if state.undone:
                self._finite &= finite(output)
        sums = self._tally
        sums.encode, sums.transfer = (
            sums.encode + encoded - begin,
            sums.transfer + received - encoded,
        )
        sums.decode += time.perf_counter() - received
        sums.buckets += 1
        sums.wire += sum(message.numel() for message in mine.values())
        sums.raw += 4 * row * len(mine)
        sums.theory += unit.rows[0].codec.theory(row) * len(mine)

    def _encoded(self, unit: FsdpUnit, peer: int, values: Tensor) -> Tensor:
        piece, state = unit.rows[peer], self._state
        message = buffers.host(self._length(unit), values.device)
        near = buffers.beside(message[HEADER:], values)
        self._head(unit, state.rank).write(message)
        residual = state.residual(piece, slice(0, piece.size), summed=False)
        measured = self._check_every > 0 and state.step % self._check_every == 0
        wanted = values + residual if measured and residual is not None else values
        piece.codec.encode(values, near, state.draw(piece, state.step, 0, summed=False), residual)
        if measured:
            self._tally.measure(wanted, piece.codec, near)
        if not buffers.native(values):
            message[HEADER:].copy_(near)
        return message

    def _smaller(self, unit: FsdpUnit, row: int) -> FsdpUnit:
        """Returns a unit without the parameters that had no gradients."""
        if self.codec.residual:
            raise QSyncError(
                f"FSDP reduces {row} values a rank in place of {unit.row}, as some parameters had no gradients, and what {self.codec.name} "
                "has left of gradients cannot be told apart",
                where=unit.name or "the model",
                do="call model.set_reduce_scatter_unused_params(True), or use a codec that keeps no residual, such as qsgd4",
            )
        return FsdpUnit(
            unit.name,
            unit.index,
            row,
            _rows(unit.name, unit.index, row, unit.rows[0].codec, self._state.world),
        )

    def _head(self, unit: FsdpUnit, sender: int) -> MessageHeader:
        subject = point_to_point.hash_of(self._state.codec)
        return MessageHeader(
            subject, sender, unit.index, self._state.step, self._length(unit) - HEADER
        )

    def _length(self, unit: FsdpUnit) -> int:
        return HEADER + unit.rows[0].codec.nbytes(unit.row)

    def _watch(self) -> None:
        """Has the backward pass end with what ranks tell each other."""
        if not self._begun:
            self._begun = True
            self._state.begin(scale_of(self._loss_scaler))
            self._state.undone = self._loss_scaler is not None and self._loss_scaler.is_enabled()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        state, faults = self._state, self._faults
        saved = self._finite
        self._begun, self._faults, self._finite = False, [], True
        state.settle(
            point_to_point.settle(
                self._group, state.rank, state.world, state.step, faults, 0, saved
            )
        )
        state.step += 1
        self._tally.steps += 1


class Scatter:
    """What FSDP calls to reduce and scatter the gradients of a unit: a `ReduceScatter` of torch, an interface that is not public."""

    def __init__(self, compression: ShardedCompression, unit: FsdpUnit) -> None:
        self._compression, self._unit = compression, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._compression.reduce(self._unit, output_tensor, input_tensor, op)


def _rows(name: str, index: int, row: int, codec: Codec, world: int) -> tuple[ParameterSlice, ...]:
    # Each row has random streams of its own, as each has values of its own.
    return tuple(
        ParameterSlice(f"{name} to {peer}", index * world + peer, row, codec, (0, row))
        for peer in range(world)
    )


def _is_mean(op: Any) -> bool:
    if op in (distributed.ReduceOp.AVG, distributed.ReduceOp.SUM):
        return bool(op == distributed.ReduceOp.AVG)
    raise QSyncError(
        "gradients are to be divided by a factor of the user's while they are summed, and compressed ones are summed or averaged",
        where="FSDP",
        do="leave set_gradient_divide_factor as it is, or call set_force_sum_reduction_for_comms(True)",
    )
