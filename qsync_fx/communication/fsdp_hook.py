"""Compressed reduce-scatter of FSDP2.

FSDP passes the gradients of one unit as one row for each rank, which concatenates that rank's
shards of all parameters. Rows are coded without knowledge of parameters: codec units may cross the
ends of parameters, but not of rows. A rank sends each other rank its row; it sums the received rows
and its own, which is not coded, in rank order.

Invariant: the result of a step depends on the gradients, the codec, the error feedback, the seed
and the step. A shard has one owner, so there are no replicas to compare.
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
    """FSDP unit, whose gradients are reduced together.

    Attributes:
        name: name of its module; "" for the root.
        index: position among the model's units.
        row: values of a rank's row, padding included.
        rows: codec slice for the row of each rank.
    """

    name: str
    index: int
    row: int
    rows: tuple[ParameterSlice, ...]


class ShardedCompression(CompressorHandle):
    """Compressor of a model that FSDP2 shards.

    Args:
        group: process group that no other code uses.
        sizes: values of a row by unit name.
        least: units with fewer values in all rows stay in FP32.
        scaler: GradScaler of the loss, or None.

    Attributes:
        codec: codec of gradients.
        units: units in model order.
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
        """Return at once: FSDP waits for the reduction of each unit."""

    def state_dict(self) -> dict[str, Any]:
        return self._state.saved()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`.

        Raises:
            OptionError: the state is of another codec or another model.
        """
        self._state.load(state, [piece for unit in self.units for piece in unit.rows])

    def report(self) -> statistics.Report:
        rank, world = self._state.rank, self._state.world
        coded = sum(unit.row * world for unit in self.units if unit.rows[0].codec == self.codec)
        plain = sum(unit.row * world for unit in self.units) - coded
        result = statistics.report(self.codec.name, rank, world, coded, plain, self._tally)
        return replace(result, replicated=False)

    def statement(self) -> dict[str, list[str]]:
        return {
            "gradient codec": [
                repr(self.codec),
                f"measured every {self._check_every} steps",
                *(["with the scale of a GradScaler"] if self._loss_scaler is not None else []),
            ],
            "gradient seed": [str(self._state.seed)],
            "tensor codec": [
                f"{unit.name}: rows of {unit.row} by {unit.rows[0].codec!r}" for unit in self.units
            ],
        }

    def scatter(self, unit: FsdpUnit) -> Scatter:
        return Scatter(self, unit)

    def reduce(self, unit: FsdpUnit, output: Tensor, value: Tensor, op: Any) -> None:
        """Reduce-scatter a unit: write the sum or mean of this rank's rows into `output`.

        Args:
            output: [row], this rank's shard.
            value: [world * row], this rank's rows for all ranks.
            op: ReduceOp.SUM or ReduceOp.AVG.

        Raises:
            RankError: a rank is gone.
            QSyncError: `op` is another reduction, or a gradient is missing for error feedback.
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
        """Return a unit without the parameters that had no gradients."""
        if self.codec.residual:
            raise QSyncError(
                f"FSDP reduces {row} values per rank instead of {unit.row}, as some parameters "
                f"had no gradients: the error feedback of {self.codec.name} cannot be assigned to "
                "parameters",
                where=unit.name or "the model",
                do="call model.set_reduce_scatter_unused_params(True), or use a codec without "
                "error feedback, such as qsgd4",
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
        """Start a step, and queue its end after the backward pass."""
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
    """Reduce-scatter callable of one unit; implements torch's private `ReduceScatter` protocol."""

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
    # Each row has its own random stream, since its values differ.
    return tuple(
        ParameterSlice(f"{name} to {peer}", index * world + peer, row, codec, (0, row))
        for peer in range(world)
    )


def _is_mean(op: Any) -> bool:
    if op in (distributed.ReduceOp.AVG, distributed.ReduceOp.SUM):
        return bool(op == distributed.ReduceOp.AVG)
    raise QSyncError(
        "compressed gradients can only be summed or averaged, but FSDP divides them by a custom "
        "factor",
        where="FSDP",
        do="do not call set_gradient_divide_factor, or call "
        "set_force_sum_reduction_for_comms(True)",
    )
