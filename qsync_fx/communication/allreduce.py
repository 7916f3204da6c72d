"""All-reduce (mean) of compressed buckets: reduce-scatter followed by all-gather.

With two ranks, or with a codec that sets `gathered`, a single all-gather replaces both exchanges.
Invariant: all ranks end with the same bits: they sum in rank order, and decode their own bytes too.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.communication import bucket as geometry
from qsync_fx.communication.bucket import Bucket, ParameterSlice
from qsync_fx.communication.codecs import PLAIN, Codec, buffers
from qsync_fx.communication.collective import Collective
from qsync_fx.communication.compressor_state import CompressorState, finite_flag
from qsync_fx.communication.message_header import MessageHeader
from qsync_fx.communication.point_to_point import Chunk, PointToPoint, chunks_of, sizes_of
from qsync_fx.communication.statistics import CommunicationStatistics
from qsync_fx.communication.step_outcome import GRADIENTS, StepOutcome, settle
from qsync_fx.communication.transport import Transfer, Transport


@dataclass(frozen=True)
class OutgoingMessage:
    """Message to send, in chunks, with values of each parameter of a bucket."""

    chunks: Sequence[Chunk]
    parts: Sequence[slice]  # of each parameter
    values: Sequence[Tensor]  # of each part, FP32
    residuals: Sequence[Tensor | None]  # error feedback of each part, FP32
    summed: bool  # whether the values are a mean


@dataclass(frozen=True)
class IncomingMessages:
    """Messages in chunks, with the same parts of a bucket, to be summed and divided."""

    chunks: Sequence[Chunk]
    senders: Sequence[int]  # member indexes, in summation order
    values: Sequence[Tensor]  # output of each part, FP32
    add: bool = False  # whether coded parts are added to `values`; FP32 parts replace them
    divisor: int = 1
    unread: set[int] = field(default_factory=set)  # members with another message


@dataclass
class Reducer:
    """All-reduce of one bucket after another. Its methods raise `RankError` if a rank is gone."""

    group: Any  # a process group on the CPU that no other code uses
    state: CompressorState
    members: tuple[int, ...] = ()  # in summation order; all ranks by default
    collective: Any = None  # process group of the members on the device; None: point to point
    tally: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    outcome: StepOutcome = field(default_factory=StepOutcome)  # callers may clear `finite`
    used: bool = True  # whether the last step was finite on all ranks
    member_index: int = field(init=False)  # index of this rank in `members`
    transport: Transport = field(init=False)
    checked: list[Transport] = field(init=False)  # whose headers are checked at the end of a step
    _buffers: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    _finite: list[Tensor] = field(default_factory=list)  # flags on the device

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.state.world))
        self.member_index = self.members.index(self.state.rank)
        settings = self.members, self.member_index, self.state.device
        if self.collective is None:
            self.transport = PointToPoint(self.group, *settings)
        else:
            self.transport = Collective(self.collective, self.group, *settings)
        self.checked = [self.transport]

    def reduce(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by their mean over the members."""
        flats = self.flats(bucket)
        self.mean(bucket, flats)
        self.put_back(bucket, flats)
        self.end(bucket, *geometry.volumes(bucket.pieces, self.member_index, len(self.members)))

    def mean(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Replace `flats` (FP32, one tensor for each piece) by their mean over the members."""
        if len(self.members) == 1:
            return
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            self.state.spend(piece, flat)
        in_full = geometry.gathered([piece.codec for piece in bucket.pieces], len(self.members))
        for is_full in (True, False):
            items = zip(bucket.pieces, flats, in_full, strict=True)
            selected = [(piece, flat) for piece, flat, full in items if full == is_full]
            if not selected:
                continue
            pieces, values = zip(*selected, strict=True)
            part = replace(bucket, pieces=pieces)
            if is_full:
                self._gather_and_sum(part, values)
            else:
                self.reduce_scatter(part, values)
                self.all_gather(part, _cut(values, part.parts(self.member_index)), values)

    def scatter(self, bucket: Bucket) -> None:
        """Reduce-scatter a bucket in place: this rank's shards get the mean, all others zeros."""
        flats = self.flats(bucket)
        self.reduce_scatter(bucket, flats)
        for part, flat in zip(bucket.parts(self.member_index), flats, strict=True):
            flat[: part.start].zero_()
            flat[part.stop :].zero_()
        self.put_back(bucket, flats)
        self.count(*geometry.scattering(bucket.pieces, self.member_index))

    def give(
        self, bucket: Bucket, shards: Sequence[Tensor], flats: Sequence[Tensor], add: bool = False
    ) -> None:
        """All-gather the `shards` of all ranks, FP32, into `flats`, full tensors in coding order.

        With `add`, coded shards are added to `flats`; FP32 shards replace its values.
        """
        self.all_gather(bucket, shards, flats, add)
        self.count(*geometry.giving(bucket.pieces, self.member_index, len(self.members)))

    def end(self, bucket: Bucket, raw: int, theory: float) -> None:
        self.count(raw, theory)
        if bucket.measured:
            self.add_to_digest(bucket.values)

    def add_to_digest(self, values: Tensor) -> None:
        """Add FP32 values to the digest that ranks compare at the end of the step."""
        # The payload of a NaN differs between instruction sets.
        bits = torch.where(values.isnan(), torch.nan, values).cpu().numpy().tobytes()
        self.outcome.digest = zlib.crc32(bits, self.outcome.digest)

    def fault(self, about: str, sender: int, description: str) -> None:
        """Record an unreadable message of a rank; `settle` raises it on all ranks."""
        text = f"rank {self.state.rank} cannot read the message of rank {sender} for {about}"
        self.outcome.faults.append(f"{text}: {description}")

    def require_finite(self, values: Tensor) -> None:
        """End the step as not finite on all ranks if any value is NaN or infinite."""
        self._finite.append(finite_flag(values))

    def settle(self, step: int, compared: bool = False, reported: str = GRADIENTS) -> None:
        """End a step as `step_outcome.settle`; `compared` counts as a check."""
        self.tally.steps += 1
        rank, world = self.state.rank, self.state.world
        if world == 1:
            return
        for transport in self.checked:
            for item in transport.faults():
                self.fault(item.about, item.sender, item.description)
        self.outcome.finite &= all(map(bool, self._finite))
        self._finite.clear()
        outcome, self.outcome = self.outcome, StepOutcome()
        self.used = settle(self.group, rank, world, step, outcome, reported)
        self.state.settle(self.used)
        self.tally.checks += compared

    def flats(self, bucket: Bucket) -> list[Tensor]:
        begin, room = time.perf_counter(), None
        if size := bucket.reordered:
            key = bucket.index, "order"
            if key not in self._buffers or self._buffers[key].numel() != size:
                self._buffers[key] = bucket.values.new_zeros(size)
            room = self._buffers[key]
        flats = bucket.flats(room)
        self.tally.encode += time.perf_counter() - begin
        return flats

    def put_back(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        begin = time.perf_counter()
        bucket.put_back(flats)
        self.tally.decode += time.perf_counter() - begin

    def buffer(self, *key: object, nbytes: int) -> Tensor:
        """Return a host buffer; it is reused, because allocation costs more than a copy."""
        result = self._buffers.get(key)
        if result is None or result.numel() < nbytes:
            result = self._buffers[key] = buffers.host(nbytes, self.state.device)
        return result[:nbytes]

    def count(self, raw: int, theory: float) -> None:
        self.tally.buckets += 1
        self.tally.raw += raw
        self.tally.theory += theory

    def _gather_and_sum(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        parts = [slice(0, piece.size) for piece in bucket.pieces]
        mine, world = self._message(bucket, flats, parts), len(self.members)
        sizes = [sizes_of(mine.chunks)] * world
        transfer = self.transport.gather(self._header(bucket), bucket.about, sizes)
        incoming = IncomingMessages(mine.chunks, range(world), flats, divisor=world)
        self._exchange(bucket, transfer, [mine], [incoming])
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            piece.codec.settle(flat)

    def reduce_scatter(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Write the mean into this rank's shards of `flats`; other values are undefined."""
        outgoing = []
        for owner in range(len(self.members)):
            parts = bucket.parts(owner)
            outgoing.append(self._message(bucket, _cut(flats, parts), parts))
        sizes = [sizes_of(message.chunks) for message in outgoing]
        transfer = self.transport.scatter(self._header(bucket), bucket.about, sizes)
        mine, world = outgoing[self.member_index], len(self.members)
        means = _cut(flats, mine.parts)
        incoming = IncomingMessages(mine.chunks, range(world), means, divisor=world)
        self._exchange(bucket, transfer, outgoing, [incoming])

    def all_gather(
        self, bucket: Bucket, shards: Sequence[Tensor], flats: Sequence[Tensor], add: bool = False
    ) -> None:
        """Send this rank's shards to all, and write the shards of all ranks into `flats`."""
        parts = [bucket.parts(owner) for owner in range(len(self.members))]
        incoming = [
            IncomingMessages(self._chunks(bucket, item), [owner], _cut(flats, item), add)
            for owner, item in enumerate(parts)
        ]
        mine = self._message(bucket, shards, parts[self.member_index], summed=True)
        sizes = [sizes_of(item.chunks) for item in incoming]
        header = self._header(bucket, summed=True)
        transfer = self.transport.gather(header, bucket.about, sizes)
        self._exchange(bucket, transfer, [mine], incoming)

    def _message(
        self,
        bucket: Bucket,
        values: Sequence[Tensor],
        parts: Sequence[slice],
        summed: bool = False,
    ) -> OutgoingMessage:
        both = zip(bucket.pieces, parts, strict=True)
        residuals = [self.state.residual(piece, part, summed) for piece, part in both]
        return OutgoingMessage(self._chunks(bucket, parts), parts, values, residuals, summed)

    def _chunks(self, bucket: Bucket, parts: Sequence[slice]) -> list[Chunk]:
        return chunks_of(bucket.pieces, parts, most_bytes=self.transport.chunk_bytes)

    def _exchange(
        self,
        bucket: Bucket,
        transfer: Transfer,
        outgoing: Sequence[OutgoingMessage],
        incoming: Sequence[IncomingMessages],
    ) -> None:
        begin, coding = time.perf_counter(), self.tally.coding
        for number in range(max(map(len, transfer.outgoing))):
            for index, message in enumerate(outgoing):
                if number < len(message.chunks):
                    self._encode(bucket, message, number, transfer.outgoing[index][number])
                transfer.send(index, number)
        for number in range(max(map(len, transfer.incoming))):
            for item in incoming:
                if number < len(item.chunks):
                    self._receive(bucket, transfer, item, number)
        transfer.end()
        self.tally.transfer += time.perf_counter() - begin - (self.tally.coding - coding)
        self.tally.wire += transfer.nbytes

    def _receive(
        self, bucket: Bucket, transfer: Transfer, incoming: IncomingMessages, number: int
    ) -> None:
        for sender in incoming.senders:
            if (description := transfer.wait(sender, number)) is not None:
                self.fault(bucket.about, self.members[sender], description)
                incoming.unread.add(sender)
        self._decode(bucket, transfer, incoming, number)

    def _encode(self, bucket: Bucket, message: OutgoingMessage, number: int, sent: Tensor) -> None:
        begin, chunk = time.perf_counter(), message.chunks[number]
        near = buffers.device_buffer(sent, message.values[0]) if chunk.runs else sent
        for run in chunk.runs:
            piece, residual = bucket.pieces[run.place], message.residuals[run.place]
            full = values = message.values[run.place][run.values]
            target = near[chunk.within(run)]
            measured = bucket.measured and not message.summed
            if residual is not None:
                residual = residual[run.values]
                full = values + residual if measured else values
            first = message.parts[run.place].start + run.values.start
            draw = self.state.draw(piece, bucket.step, first, message.summed)
            piece.codec.encode(values, target, draw, residual)
            if measured:
                self.tally.measure(full, piece.codec, target)
        if near is not sent:
            sent.copy_(near)
        self.tally.encode += time.perf_counter() - begin

    def _decode(
        self, bucket: Bucket, transfer: Transfer, incoming: IncomingMessages, number: int
    ) -> None:
        begin = time.perf_counter()
        chunk, values = incoming.chunks[number], incoming.values
        if not chunk.runs:
            return
        senders = [sender for sender in incoming.senders if sender not in incoming.unread]
        for order, sender in enumerate(senders):
            near = buffers.on_device_of(transfer.incoming[sender][number], values[0])
            last = order + 1 == len(senders) and incoming.divisor == 1
            for run in chunk.runs:
                codec, target = bucket.pieces[run.place].codec, values[run.place][run.values]
                add = order > 0 or (incoming.add and codec != PLAIN)
                try:
                    codec.decode(near[chunk.within(run)], target, add, last)
                except ValueError as error:
                    self.fault(bucket.about, self.members[sender], str(error))
        if incoming.divisor > 1:
            for run in chunk.runs:
                values[run.place][run.values].div_(incoming.divisor)
        if not self.transport.on_device:
            buffers.synchronize(values[0])
        self.tally.decode += time.perf_counter() - begin

    def _header(self, bucket: Bucket, summed: bool = False) -> MessageHeader:
        rank, number = self.state.rank, 2 * bucket.index + summed
        return MessageHeader(self.state.codec, rank, number, bucket.step)


_FEEDBACK: Final = 0  # number of a message with error feedback, between two steps
_INSIDE: Final = 0x5851F42D4C957F2D  # any constant: it separates the random streams of two levels


def _cut(flats: Sequence[Tensor], parts: Sequence[slice]) -> list[Tensor]:
    return [flat[part] for flat, part in zip(flats, parts, strict=True)]


@dataclass(frozen=True)
class NodeGroups:
    """Ranks of each node, ascending; all nodes have the same number of ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranks[0])

    def node_of(self, rank: int) -> tuple[int, ...]:
        return next(node for node in self.ranks if rank in node)

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard, one of each node."""
        place = self.node_of(rank).index(rank)
        return tuple(node[place] for node in self.ranks)

    def __str__(self) -> str:
        nodes = "; ".join(", ".join(map(str, node)) for node in self.ranks)
        return f"{len(self.ranks)} nodes of {self.size} ranks: {nodes}"


@dataclass
class Hierarchy:
    """Reducer of two levels with the codecs of the parameters: inside nodes, and between them.

    Each rank averages one shard of its node's gradients with the same shard of the other nodes, as
    in ZeRO++ (G. Wang et al., 2023) and SDP4Bit (J. Jia et al., 2024).
    """

    nodes: NodeGroups
    reducer: Reducer  # over the ranks of other nodes; its group contains all ranks
    collective: Any = None  # process group of this node on the device; None: point to point

    def __post_init__(self) -> None:
        node = self.nodes.node_of(self.reducer.state.rank)
        self._inside = inside_node(self.nodes, self.reducer, self.collective)
        self._place = node.index(self.reducer.state.rank)

    def share(self, piece: ParameterSlice) -> ParameterSlice:
        """Return the slice of a parameter that this rank averages between nodes."""
        part = self._in_node(piece).part(self._place)
        # Each shard has a random stream of its own.
        index = piece.index * self.nodes.size + self._place
        size, count = part.stop - part.start, len(self.nodes.ranks)
        return geometry.cut(piece.name, index, size, piece.codec, count)

    def recode(
        self, changes: Sequence[tuple[ParameterSlice, ParameterSlice, Tensor]], step: int
    ) -> None:
        """Convert the error feedback of old slices to new ones; call it on all ranks of a node.

        Each change is an old slice, a new one, and a tensor with the layout of the gradients.
        Codecs cut shards differently, so the ranks of a node first gather their feedback.
        """
        state, part = self.reducer.state, self._place
        local = [replace(self._in_node(old), codec=PLAIN) for old, _, _ in changes]
        flats = [like.new_zeros(old.size, dtype=torch.float32) for old, _, like in changes]
        shards = _cut(flats, [piece.part(part) for piece in local])
        for (old, _, _), shard in zip(changes, shards, strict=True):
            state.take_feedback(
                self.share(old), self.reducer.member_index, len(self.reducer.members), shard
            )
        bucket = Bucket(_FEEDBACK, step, torch.empty(0), local, ())
        self._inside.all_gather(bucket, shards, flats)
        add_inside(self.reducer, self._inside)
        for (old, new, like), flat in zip(changes, flats, strict=True):
            feedback = geometry.recoded(old, new, like, flat)[self._in_node(new).part(part)]
            if feedback.any():
                state.sent.values[new.name] = feedback.clone()
                state.sent.scales[new.name] = state.sent.scale

    def reduce(self, bucket: Bucket) -> None:
        flats = self.reducer.flats(bucket)
        pieces = [
            replace(self._in_node(piece), codec=PLAIN if piece.codec == PLAIN else piece.inside)
            for piece in bucket.pieces
        ]
        local = replace(bucket, pieces=pieces, measured=False)
        shares = [self.share(piece) for piece in bucket.pieces]
        shards = _cut(flats, local.parts(self._place))
        self._inside.state.seed = inside_seed(self.reducer.state)
        self._inside.reduce_scatter(local, flats)
        self.reducer.mean(replace(bucket, pieces=shares), shards)
        self._inside.all_gather(local, shards, flats)
        add_inside(self.reducer, self._inside)
        self.reducer.put_back(bucket, flats)
        rank = self.reducer.state.rank
        across = self.nodes.across(rank)
        self.reducer.end(bucket, *geometry.volumes(shares, across.index(rank), len(across)))

    def _in_node(self, piece: ParameterSlice) -> ParameterSlice:
        return geometry.cut(piece.name, piece.index, piece.size, piece.codec, self.nodes.size)


def layout(nodes: NodeGroups | None, inside: Iterable[Codec]) -> str:
    """Return a description of the nodes and of the codecs inside them, which ranks compare."""
    names = coded_names(inside)
    return f"{nodes}; {names} inside" if nodes and names else str(nodes or "none")


def coded_names(codecs: Iterable[Codec]) -> str:
    """Return the distinct codecs other than FP32 as text."""
    return " and ".join(sorted({repr(codec) for codec in codecs if codec != PLAIN}))


def inside_node(nodes: NodeGroups, reducer: Reducer, collective: Any = None) -> Reducer:
    """Return the reducer inside the node of a rank; `reducer` ends its steps."""
    state = reducer.state
    inside = state.like(f"inside a node, {state.codec}")
    result = Reducer(reducer.group, inside, nodes.node_of(state.rank), collective)
    reducer.checked.append(result.transport)
    return result


def inside_seed(state: CompressorState) -> int:
    """Return the seed inside nodes, whose random numbers must not repeat those between nodes."""
    return state.seed ^ _INSIDE


def add_inside(reducer: Reducer, inside: Reducer) -> None:
    """Move the statistics and faults inside a node to the reducer between nodes."""
    tally, other = reducer.tally, inside.tally
    tally.encode += other.encode
    tally.decode += other.decode
    tally.transfer += other.transfer
    tally.inside += other.wire
    reducer.outcome.faults += inside.outcome.faults
    inside.tally, inside.outcome = CommunicationStatistics(), StepOutcome()
