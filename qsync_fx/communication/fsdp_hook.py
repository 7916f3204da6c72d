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
from qsync_fx.communication.compressor_state import CompressorHandle, CompressorState
from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.message_header import HEADER, MessageHeader
from qsync_fx.communication.point_to_point import exchange
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
    def length(self) -> int:
        """Bytes of a message, header included."""
        return HEADER + self.codec.nbytes(self.row)


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
    ) -> None:
        self.codec, units = codec, []
        for index, (name, row) in enumerate(sizes.items()):
            chosen = codec if row * world >= least else PLAIN
            units.append(FsdpUnit.of(name, index, row, chosen, world))
        self.units = tuple(units)
        self._check_every, self._begun = check_every, False
        self._state = CompressorState(rank, world, f"sharded, {codec!r}", seed, device)
        self._reducer = Reducer(group, self._state)  # for statistics and the end of steps
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
        return Report(self.codec.name, rank, world, coded, plain, tally, replicated=False)

    def statement(self) -> dict[str, list[str]]:
        codec = [repr(self.codec), f"measured every {self._check_every} steps"]
        if self._loss_scaler is not None:
            codec.append("with the scale of a GradScaler")
        rows = [f"{unit.name}: rows of {unit.row} by {unit.codec!r}" for unit in self.units]
        seed = [str(self._state.seed)]
        return {"gradient codec": codec, "gradient seed": seed, "tensor codec": rows}

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
            peers = [peer for peer in range(state.world) if peer != state.rank]
            outgoing = {peer: self._encoded(unit, peer, rows[peer]) for peer in peers}
            encoded = time.perf_counter()
            incoming = {peer: buffers.host(unit.length, rows.device) for peer in peers}
            exchange(self._reducer.group, outgoing, incoming, about)
            received = time.perf_counter()
            total = torch.zeros(row, dtype=torch.float32, device=rows.device)
            for sender in range(state.world):
                if sender == state.rank:
                    total += rows[sender]
                else:
                    self._add(unit, sender, incoming[sender], total, about)
            output.copy_(total.div_(divisor))
            if state.sent.undone:
                self._reducer.require_finite(output)
        tally.encode += encoded - begin
        tally.transfer += received - encoded
        tally.decode += time.perf_counter() - received
        tally.wire += unit.length * len(peers)
        self._reducer.count(4 * row * len(peers), unit.codec.theory(row) * len(peers))

    def _encoded(self, unit: FsdpUnit, peer: int, values: Tensor) -> Tensor:
        piece, state = unit.rows[peer], self._state
        message = buffers.host(unit.length, values.device)
        near = buffers.device_buffer(message[HEADER:], values)
        self._header(unit, state.rank).write(message)
        residual, full = state.residual(piece, slice(0, piece.size), summed=False), values
        measured = self._check_every > 0 and state.step % self._check_every == 0
        if measured and residual is not None:
            full = values + residual
        piece.codec.encode(values, near, state.draw(piece, state.step, 0, summed=False), residual)
        if measured:
            self._reducer.tally.measure(full, piece.codec, near)
        if not buffers.native(values):
            message[HEADER:].copy_(near)
        return message

    def _add(self, unit: FsdpUnit, sender: int, message: Tensor, total: Tensor, about: str) -> None:
        if (fault := self._header(unit, sender).fault(message)) is None:
            wire = buffers.on_device_of(message[HEADER:], total)
            unit.codec.decode(wire, total, add=True)
            return
        self._reducer.fault(about, sender, fault)

    def _without_unused(self, unit: FsdpUnit, row: int) -> FsdpUnit:
        if self.codec.residual:
            text = f"some parameters had no gradients, so the error feedback of {self.codec.name} "
            text += f"for {unit.row} values does not fit {row}"
            do = "call model.set_reduce_scatter_unused_params(True), or use a codec like qsgd4"
            raise QSyncError(text, where=unit.name or "the model", do=do)
        return FsdpUnit.of(unit.name, unit.index, row, unit.codec, self._state.world)

    def _header(self, unit: FsdpUnit, sender: int) -> MessageHeader:
        state, length = self._state, unit.length - HEADER
        return MessageHeader(state.codec, sender, unit.index, state.step, length)

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
