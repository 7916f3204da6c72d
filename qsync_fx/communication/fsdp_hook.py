"""Compressed reduce-scatter of FSDP2.

FSDP passes the gradients of one unit as one row for each rank, with that rank's shards. A rank sums
the rows that it receives and its own, which is not coded, in rank order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from qsync_fx.communication import compressor_state
from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import ParameterSlice
from qsync_fx.communication.codecs import PLAIN, Codec, buffers
from qsync_fx.communication.collective import CollectiveGroups
from qsync_fx.communication.compressor_state import CompressorHandle, CompressorState
from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.message_header import MessageHeader
from qsync_fx.communication.statistics import Report
from qsync_fx.errors import QSyncError
from qsync_fx.torch_internals import _execution_engine


@dataclass(frozen=True)
class FsdpUnit:
    """FSDP unit `name` ("" for the root), whose gradients are reduced together."""

    name: str
    index: int
    row: int  # values of a rank's row, padding included
    rows: tuple[ParameterSlice, ...]  # codec slice for the row of each rank

    @classmethod
    def of(cls, name: str, index: int, row: int, codec: Codec, world: int) -> FsdpUnit:
        # Each row has its own random stream, since its values differ.
        rows = (
            ParameterSlice(f"{name} to {peer}", index * world + peer, row, codec, (0, row))
            for peer in range(world)
        )
        return cls(name, index, row, tuple(rows))

    @property
    def codec(self) -> Codec:
        return self.rows[0].codec

    @property
    def nbytes(self) -> int:
        """Bytes of a message, without its header."""
        return self.codec.nbytes(self.row)


class ShardedCompression(CompressorHandle):
    """Compressor of a model that FSDP2 shards; `sizes` has the values of a row by unit name."""

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
        collectives: CollectiveGroups | None = None,
    ) -> None:
        self.codec, units = codec, []
        for index, (name, row) in enumerate(sizes.items()):
            chosen = codec if row * world >= least else PLAIN
            units.append(FsdpUnit.of(name, index, row, chosen, world))
        self.units = tuple(units)
        self._check_every, self._begun = check_every, False
        self._state = CompressorState(rank, world, f"sharded, {codec!r}", seed, device)
        coded = None if collectives is None else collectives.coded
        # For the transport, statistics and the end of steps.
        self._reducer = Reducer(group, self._state, collective=coded)
        self._loss_scaler = scaler if codec.residual else None

    def wait(self) -> None:
        """Return at once: FSDP waits for the reduction of each unit."""

    def state_dict(self) -> dict[str, Any]:
        return self._state.saved()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load(state, [piece for unit in self.units for piece in unit.rows])

    def report(self) -> Report:
        rank, world = self._state.rank, self._state.world
        coded = sum(unit.row * world for unit in self.units if unit.codec == self.codec)
        plain = sum(unit.row * world for unit in self.units) - coded
        tally = replace(self._reducer.tally)
        transport = str(self._reducer.transport)
        return Report(
            self.codec.name,
            rank,
            world,
            coded,
            plain,
            tally,
            replicated=False,
            transport=transport,
        )

    def statement(self) -> dict[str, list[str]]:
        codec = [repr(self.codec), f"measured every {self._check_every} steps"]
        if self._loss_scaler is not None:
            codec.append("with the scale of a GradScaler")
        rows = [f"{unit.name}: rows of {unit.row} by {unit.codec!r}" for unit in self.units]
        seed = [str(self._state.seed)]
        return {
            "gradient codec": codec,
            "gradient seed": seed,
            "transport": [self._reducer.transport.name],
            "tensor codec": rows,
        }

    def reduce(self, unit: FsdpUnit, output: Tensor, value: Tensor, op: Any) -> None:
        """Write the sum or mean of all ranks' rows for this rank into `output` [row].

        `value` [world * row] has this rank's rows for all ranks.
        """
        state, row, tally = self._state, output.numel(), self._reducer.tally
        divisor = _divisor(op, state.world)
        self._watch()
        if row != unit.row:
            unit = self._without_unused(unit, row)
        about = f"{unit.name or 'the model'} in step {state.step}"
        with torch.no_grad():
            rows = value.to(torch.float32).view(state.world, row)
            begin = time.perf_counter()
            sizes = [[unit.nbytes]] * state.world
            header = MessageHeader(state.codec, state.rank, unit.index, state.step)
            transfer = self._reducer.transport.scatter(header, about, sizes)
            for peer, (sent,) in enumerate(transfer.outgoing):
                if peer != state.rank:
                    self._encode(unit, peer, rows[peer], sent)
                transfer.send(peer, 0)
            encoded = time.perf_counter()
            descriptions = [transfer.wait(sender, 0) for sender in range(state.world)]
            transfer.end()
            received = time.perf_counter()
            total = torch.zeros(row, dtype=torch.float32, device=rows.device)
            for sender, description in enumerate(descriptions):
                if sender == state.rank:
                    total += rows[sender]
                elif description is not None:
                    self._reducer.fault(about, sender, description)
                else:
                    self._add(unit, transfer.incoming[sender][0], total)
            output.copy_(total.div_(divisor))
            if not self._reducer.transport.on_device:
                buffers.synchronize(output)
            if state.sent.undone:
                self._reducer.require_finite(output)
        tally.encode += encoded - begin
        tally.transfer += received - encoded
        tally.decode += time.perf_counter() - received
        tally.wire += transfer.nbytes
        others = state.world - 1
        self._reducer.count(4 * row * others, unit.codec.theory(row) * others)

    def _encode(self, unit: FsdpUnit, peer: int, values: Tensor, sent: Tensor) -> None:
        piece, state, near = unit.rows[peer], self._state, sent
        if not self._reducer.transport.on_device:
            near = buffers.device_buffer(sent, values)
        residual, full = state.residual(piece, slice(0, piece.size), summed=False), values
        measured = self._check_every > 0 and state.step % self._check_every == 0
        if measured and residual is not None:
            full = values + residual
        piece.codec.encode(values, near, state.draw(piece, state.step, 0, summed=False), residual)
        if measured:
            self._reducer.tally.measure(full, piece.codec, near)
        if near is not sent:
            sent.copy_(near)

    def _add(self, unit: FsdpUnit, message: Tensor, total: Tensor) -> None:
        if not self._reducer.transport.on_device:
            message = buffers.on_device_of(message, total)
        unit.codec.decode(message, total, add=True)

    def _without_unused(self, unit: FsdpUnit, row: int) -> FsdpUnit:
        if self.codec.residual:
            text = f"some parameters had no gradients, so the error feedback of {self.codec.name} "
            text += f"for {unit.row} values does not fit {row}"
            do = "call model.set_reduce_scatter_unused_params(True), or use a codec like qsgd4"
            raise QSyncError(text, where=unit.name or "the model", do=do)
        return FsdpUnit.of(unit.name, unit.index, row, unit.codec, self._state.world)

    def _watch(self) -> None:
        """Start a step, and queue its end after the backward pass."""
        if not self._begun:
            self._begun = True
            scaler = self._loss_scaler
            scale, is_scaled = compressor_state.scale_of(scaler), compressor_state.is_scaled(scaler)
            self._state.begin(scale, is_scaled)
            engine: Any = _execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        self._begun = False
        self._reducer.settle(self._state.step)
        self._state.step += 1


class Scatter:
    """Reduce-scatter callable of one unit; implements torch's private `ReduceScatter` protocol."""

    def __init__(self, compression: ShardedCompression, unit: FsdpUnit) -> None:
        self._compression, self._unit = compression, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = None
    ) -> None:
        self._compression.reduce(self._unit, output_tensor, input_tensor, op)


def _divisor(op: Any, world: int) -> int:
    if op == distributed.ReduceOp.SUM:
        return 1
    if op == distributed.ReduceOp.AVG:
        return world
    text = "FSDP divides gradients by a custom factor, but compression only sums or averages them"
    do = "remove set_gradient_divide_factor, or call set_force_sum_reduction_for_comms(True)"
    raise QSyncError(text, where="FSDP", do=do)
