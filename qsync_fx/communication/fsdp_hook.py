"""Compressed reduce-scatter of FSDP2.

FSDP passes the gradients of one unit as one row for each rank, with that rank's shards. A rank sums
the rows that it receives and its own, which is not coded, in rank order. With nodes, the ranks of a
node first sum the rows for the ranks of all nodes with the same position.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from qsync_fx.communication import compressor_state
from qsync_fx.communication.allreduce import (
    NodeGroups,
    Reducer,
    add_inside,
    inside_node,
    inside_seed,
    layout,
)
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
        nodes: NodeGroups | None = None,
        collectives: CollectiveGroups | None = None,
        inside: Codec = PLAIN,
    ) -> None:
        self.codec, units = codec, []
        for index, (name, row) in enumerate(sizes.items()):
            chosen = codec if row * world >= least else PLAIN
            units.append(FsdpUnit.of(name, index, row, chosen, world))
        self.units = tuple(units)
        self._check_every, self._begun = check_every, False
        self.nodes, self._inside_codec, text = nodes, inside, f"sharded, {codec!r}"
        groups, members = collectives or CollectiveGroups(), tuple[int, ...]()
        if nodes is not None:
            text += f" between nodes of {nodes.size} ranks, {inside!r} inside"
            members = nodes.across(rank)
        self._state = CompressorState(rank, world, text, seed, device)
        # For transports, statistics and the end of steps.
        self._reducer, self._inside = Reducer(group, self._state, members, groups.coded), None
        if nodes is not None:
            self._inside = inside_node(nodes, self._reducer, groups.inside)
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
            inside=self._inside_codec.name,
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
            "node layout": [layout(self.nodes, [self._inside_codec])],
            "transport": [self._reducer.transport.name],
            "tensor codec": rows,
        }

    def reduce(self, unit: FsdpUnit, output: Tensor, value: Tensor, op: Any) -> None:
        """Write the sum or mean of all ranks' rows for this rank into `output` [row].

        `value` [world * row] has this rank's rows for all ranks.
        """
        state, row = self._state, output.numel()
        divisor = _divisor(op, state.world)
        self._watch()
        if row != unit.row:
            unit = self._without_unused(unit, row)
        about = f"{unit.name or 'the model'} in step {state.step}"
        with torch.no_grad():
            rows = value.to(torch.float32).view(state.world, row)
            if self.nodes is not None and self._inside is not None:
                rows = self._summed_in_node(unit, rows, about)
            peers = [unit.rows[rank] for rank in self._reducer.members]
            total = self._summed(self._reducer, peers, rows, unit.index, about)
            output.copy_(total.div_(divisor))
            if state.sent.undone:
                self._reducer.require_finite(output)
        others = len(self._reducer.members) - 1
        self._reducer.count(4 * row * others, unit.codec.theory(row) * others)

    def _summed_in_node(self, unit: FsdpUnit, rows: Tensor, about: str) -> Tensor:
        """Return the node's sums of the rows for this rank's position in each node, in FP32.

        `rows` [world, row] are this rank's; the result is [nodes, row].
        """
        nodes, inside, row = self.nodes, self._inside, rows.shape[1]
        assert nodes is not None and inside is not None
        codec, count = PLAIN if unit.codec == PLAIN else self._inside_codec, len(nodes.ranks)
        size, pieces, values = count * row, list[ParameterSlice](), list[Tensor]()
        for position in range(nodes.size):
            name, index = f"{unit.name} to position {position}", unit.index * nodes.size + position
            pieces.append(ParameterSlice(name, index, size, codec, (0, size)))
            values.append(torch.stack([rows[node[position]] for node in nodes.ranks]).view(-1))
        inside.state.seed, inside.state.step = inside_seed(self._state), self._state.step
        total = self._summed(inside, pieces, values, unit.index, about)
        add_inside(self._reducer, inside)
        return total.view(count, row)

    def _summed(
        self,
        reducer: Reducer,
        pieces: Sequence[ParameterSlice],
        rows: Sequence[Tensor] | Tensor,
        index: int,
        about: str,
    ) -> Tensor:
        """Send `rows[i]`, FP32, to member i; return the sum of this rank's rows of all members."""
        begin, position, tally = time.perf_counter(), reducer.member_index, reducer.tally
        state, members = reducer.state, reducer.members
        nbytes = pieces[position].codec.nbytes(pieces[position].size)
        header = MessageHeader(state.codec, state.rank, index, state.step)
        transfer = reducer.transport.scatter(header, about, [[nbytes]] * len(members))
        for peer, (sent,) in enumerate(transfer.outgoing):
            if peer != position:
                self._encode(reducer, pieces[peer], rows[peer], sent)
            transfer.send(peer, 0)
        encoded = time.perf_counter()
        descriptions = [transfer.wait(sender, 0) for sender in range(len(members))]
        transfer.end()
        received = time.perf_counter()
        total = torch.zeros_like(rows[position])
        for sender, description in enumerate(descriptions):
            if sender == position:
                total += rows[position]
            elif description is not None:
                reducer.fault(about, members[sender], description)
            else:
                message = buffers.on_device_of(transfer.incoming[sender][0], total)
                pieces[position].codec.decode(message, total, add=True)
        if not reducer.transport.on_device:
            buffers.synchronize(total)
        tally.encode += encoded - begin
        tally.transfer += received - encoded
        tally.decode += time.perf_counter() - received
        tally.wire += transfer.nbytes
        return total

    def _encode(
        self, reducer: Reducer, piece: ParameterSlice, values: Tensor, sent: Tensor
    ) -> None:
        state, near = reducer.state, buffers.device_buffer(sent, values)
        residual, full = state.residual(piece, slice(0, piece.size), summed=False), values
        is_checked = self._check_every > 0 and state.step % self._check_every == 0
        measured = is_checked and reducer is self._reducer
        if measured and residual is not None:
            full = values + residual
        piece.codec.encode(values, near, state.draw(piece, state.step, 0, summed=False), residual)
        if measured:
            reducer.tally.measure(full, piece.codec, near)
        if near is not sent:
            sent.copy_(near)

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
