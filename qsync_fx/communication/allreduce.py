"""All-reduce (mean) of compressed buckets: reduce-scatter followed by all-gather.

With two ranks, or with a codec that sets `gathered`, a single all-gather replaces both exchanges.
Values on a GPU are coded there, and each chunk is copied to or from the host. Invariant: all ranks
end with the same bits. Ranks sum in rank order, and a sender decodes its own bytes too. A message
of another step, bucket or codec is never decoded.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qsync_fx.communication import point_to_point
from qsync_fx.communication.bucket import Bucket, gathered, giving, scattering, volumes
from qsync_fx.communication.codecs import PLAIN, buffers
from qsync_fx.communication.compressor_state import CompressorState
from qsync_fx.communication.point_to_point import (
    HEADER,
    Chunk,
    MessageHeader,
    PendingTransfers,
    StepOutcome,
    chunks_of,
)
from qsync_fx.communication.statistics import CommunicationStatistics


@dataclass(frozen=True)
class OutgoingMessage:
    """Message to send, in chunks.

    Attributes:
        memory: its bytes, uint8 on the host; the header is written.
        parts: for each parameter of the bucket, the slice of values in the message.
        values: values of each part, FP32.
        residuals: error feedback of each part; None if the codec has none.
        summed: whether the values are a mean.
    """

    memory: Tensor
    chunks: Sequence[Chunk]
    parts: Sequence[slice]
    values: Sequence[Tensor]
    residuals: Sequence[Tensor | None]
    summed: bool


@dataclass(frozen=True)
class IncomingMessages:
    """Messages in chunks, with the same parts of a bucket, to be summed or averaged.

    Attributes:
        messages: bytes by member index, in summation order, including this rank's own.
        values: output of each part, FP32.
        summed: whether the messages are means.
        add: whether the sum of coded parts is added to `values`; FP32 parts replace it.
        divisor: divisor of the sum.
        unread: members whose message was not the expected one.
    """

    chunks: Sequence[Chunk]
    messages: Mapping[int, Tensor]
    values: Sequence[Tensor]
    summed: bool = False
    add: bool = False
    divisor: int = 1
    unread: set[int] = field(default_factory=set)


@dataclass
class Reducer:
    """All-reduce of one bucket after another. Its methods raise `RankError` if a rank is gone.

    Attributes:
        group: process group that no other code uses.
        state: error feedback, random streams and step of the compression.
        members: ranks to average over, in summation order; all ranks by default.
        outcome: outcome of this step so far; callers may clear `finite`.
        used: whether `finite` was true on all ranks in the last step.
    """

    group: Any
    state: CompressorState
    members: tuple[int, ...] = ()
    tally: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    outcome: StepOutcome = field(default_factory=StepOutcome)
    used: bool = True
    _buffers: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.state.world))
        self._own = self.members.index(self.state.rank)
        self._others = [index for index in range(len(self.members)) if index != self._own]

    def reduce(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by their mean over the members."""
        flats = self.flats(bucket)
        self.mean(bucket, flats)
        self.put_back(bucket, flats)
        self.end(bucket, *volumes(bucket.pieces, self._own, len(self.members)))

    def mean(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Replace `flats` (FP32, one tensor for each piece) by their mean over the members."""
        if len(self.members) == 1:
            return
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            self.state.spend(piece, flat)
        in_full = gathered([piece.codec for piece in bucket.pieces], len(self.members))
        for is_full, exchange in ((True, self._gather_and_sum), (False, self._two_exchanges)):
            items = zip(bucket.pieces, flats, in_full, strict=True)
            selected = [(piece, flat) for piece, flat, full in items if full == is_full]
            if selected:
                pieces, values = zip(*selected, strict=True)
                exchange(replace(bucket, pieces=pieces), values)

    def scatter(self, bucket: Bucket) -> None:
        """Reduce-scatter a bucket in place: this rank's shards get the mean, all others zeros."""
        flats = self.flats(bucket)
        self.reduce_scatter(bucket, flats)
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            part = piece.part(self._own)
            flat[: part.start].zero_()
            flat[part.stop :].zero_()
        self.put_back(bucket, flats)
        self._count(*scattering(bucket.pieces, self._own))

    def give(
        self, bucket: Bucket, shards: Sequence[Tensor], flats: Sequence[Tensor], add: bool = False
    ) -> None:
        """All-gather the shards of all ranks into full parameters.

        Args:
            shards: this rank's shards, FP32, one for each piece. The codec of the piece encodes
                them, and this rank decodes its own bytes too.
            flats: output, FP32, one full tensor for each piece in coding order.
            add: whether coded shards are added to `flats`; FP32 shards replace its values."""
        self.all_gather(bucket, shards, flats, add)
        self._count(*giving(bucket.pieces, self._own, len(self.members)))

    def end(self, bucket: Bucket, raw: int, theory: float) -> None:
        """Count a reduced bucket, and add its result to the digest if it is measured."""
        self._count(raw, theory)
        if bucket.measured:
            self.add_to_digest(bucket.values)

    def add_to_digest(self, values: Tensor) -> None:
        """Add FP32 values to the digest that ranks compare at the end of the step."""
        # The payload of a NaN differs between instruction sets.
        bits = torch.where(values.isnan(), torch.nan, values).cpu().numpy().tobytes()
        self.outcome.digest = zlib.crc32(bits, self.outcome.digest)

    def fault(self, bucket: Bucket, sender: int, description: str) -> None:
        """Record an unreadable message of a rank; `settle` raises it on all ranks."""
        text = point_to_point.unread(self.state.rank, sender, bucket.about, description)
        self.outcome.faults.append(text)

    def settle(
        self, step: int, compared: bool = False, reported: str = point_to_point.GRADIENTS
    ) -> None:
        """End a step after its last bucket.

        Args:
            compared: whether the comparison of digests is counted in the statistics.
            reported: error message for different digests, as of `point_to_point.settle`.

        Raises:
            RankError: on all ranks, if a rank could not read a message or got another result.
        """
        self.tally.steps += 1
        rank, world = self.state.rank, self.state.world
        if world == 1:
            return
        outcome, self.outcome = self.outcome, StepOutcome()
        self.used = point_to_point.settle(self.group, rank, world, step, outcome, reported)
        self.state.settle(self.used)
        self.tally.checks += compared

    def flats(self, bucket: Bucket) -> list[Tensor]:
        """Return the values of each piece in coding order; copies count as encoding time."""
        begin = time.perf_counter()
        room = None
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
        """Return a host buffer that is reused across steps; allocation costs more than a copy."""
        result = self._buffers.get(key)
        if result is None or result.numel() < nbytes:
            result = self._buffers[key] = buffers.host(nbytes, self.state.device)
        return result[:nbytes]

    def _count(self, raw: int, theory: float) -> None:
        self.tally.buckets += 1
        self.tally.raw += raw
        self.tally.theory += theory

    def _gather_and_sum(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        parts = [slice(0, piece.size) for piece in bucket.pieces]
        mine = self._message(bucket, flats, parts, "mine")
        incoming = self._mean_of_all(bucket, mine, "all of", flats)
        self._exchange(bucket, [(mine, self._others)], [incoming])
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            piece.codec.settle(flat)

    def _two_exchanges(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        self.reduce_scatter(bucket, flats)
        parts = [piece.part(self._own) for piece in bucket.pieces]
        self.all_gather(bucket, _cut(flats, parts), flats)

    def reduce_scatter(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Write the mean into this rank's shards of `flats`; other values are undefined."""
        outgoing = []
        for owner in range(len(self.members)):
            parts = [piece.part(owner) for piece in bucket.pieces]
            message = self._message(bucket, _cut(flats, parts), parts, f"to {owner}")
            outgoing.append((message, [owner] if owner != self._own else []))
        mine, _ = outgoing[self._own]
        incoming = self._mean_of_all(bucket, mine, "from", _cut(flats, mine.parts))
        self._exchange(bucket, outgoing, [incoming])

    def all_gather(
        self, bucket: Bucket, shards: Sequence[Tensor], flats: Sequence[Tensor], add: bool = False
    ) -> None:
        """Send this rank's shards to all, and write the shards of all ranks into `flats`."""
        incoming = []
        own_parts = [piece.part(self._own) for piece in bucket.pieces]
        mine = self._message(bucket, shards, own_parts, "mean", summed=True)
        for owner in range(len(self.members)):
            chunks, memory, parts = mine.chunks, mine.memory, own_parts
            if owner != self._own:
                parts = [piece.part(owner) for piece in bucket.pieces]
                chunks = chunks_of(bucket.pieces, parts)
                nbytes = chunks[-1].wire.stop
                memory = self.buffer(bucket.index, f"mean of {owner}", nbytes=nbytes)
            targets = _cut(flats, parts)
            incoming.append(
                IncomingMessages(chunks, {owner: memory}, targets, summed=True, add=add)
            )
        self._exchange(bucket, [(mine, self._others)], incoming)

    def _mean_of_all(
        self, bucket: Bucket, mine: OutgoingMessage, name: str, values: Sequence[Tensor]
    ) -> IncomingMessages:
        """Return the messages of all members for the parts of `mine`; decoding averages them."""
        nbytes, messages = mine.memory.numel(), {self._own: mine.memory}
        for peer in self._others:
            messages[peer] = self.buffer(bucket.index, f"{name} {peer}", nbytes=nbytes)
        in_rank_order = {member: messages[member] for member in sorted(messages)}
        return IncomingMessages(mine.chunks, in_rank_order, values, divisor=len(self.members))

    def _message(
        self,
        bucket: Bucket,
        values: Sequence[Tensor],
        parts: Sequence[slice],
        name: str,
        summed: bool = False,
    ) -> OutgoingMessage:
        """Return an outgoing message with room for the given parts of a bucket."""
        chunks = chunks_of(bucket.pieces, parts)
        message = self.buffer(bucket.index, name, nbytes=chunks[-1].wire.stop)
        self._header(bucket, self._own, message, summed).write(message)
        residuals = [
            self.state.residual(piece, part, summed)
            for piece, part in zip(bucket.pieces, parts, strict=True)
        ]
        return OutgoingMessage(message, chunks, parts, values, residuals, summed)

    def _exchange(
        self,
        bucket: Bucket,
        outgoing: Sequence[tuple[OutgoingMessage, Sequence[int]]],
        incoming: Sequence[IncomingMessages],
    ) -> None:
        """Send messages to members and decode incoming ones, chunk by chunk."""
        begin, coding = time.perf_counter(), self.tally.coding
        transfers = PendingTransfers(self.group, bucket.about)
        for item in incoming:
            for sender in set(item.messages) - {self._own}:
                for number, chunk in enumerate(item.chunks):
                    received = item.messages[sender][chunk.wire]
                    transfers.expect(self.members[sender], received, number)
        for number in range(max(len(message.chunks) for message, _ in outgoing)):
            for message, peers in outgoing:
                if number < len(message.chunks):
                    self._encode(bucket, message, number)
                    sent = message.memory[message.chunks[number].wire]
                    for peer in peers:
                        transfers.send(self.members[peer], sent, number)
        for number in range(max(len(item.chunks) for item in incoming)):
            for item in incoming:
                if number >= len(item.chunks):
                    continue
                for sender in set(item.messages) - {self._own}:
                    transfers.wait_received(self.members[sender], number)
                if number == 0:
                    self._check_headers(bucket, item)
                self._decode(bucket, item, number)
        transfers.end()
        self.tally.transfer += time.perf_counter() - begin - (self.tally.coding - coding)
        self.tally.wire += sum(message.memory.numel() * len(peers) for message, peers in outgoing)

    def _encode(self, bucket: Bucket, message: OutgoingMessage, number: int) -> None:
        """Encode a chunk, and measure the coding error if the bucket is measured."""
        begin = time.perf_counter()
        chunk = message.chunks[number]
        sent = message.memory[chunk.coded]
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

    def _check_headers(self, bucket: Bucket, incoming: IncomingMessages) -> None:
        for sender, message in incoming.messages.items():
            fault = self._header(bucket, sender, message, incoming.summed).fault(message)
            if fault is not None:
                self.fault(bucket, self.members[sender], fault)
                incoming.unread.add(sender)

    def _decode(self, bucket: Bucket, incoming: IncomingMessages, number: int) -> None:
        """Decode and sum a chunk of all messages."""
        begin = time.perf_counter()
        chunk, values = incoming.chunks[number], incoming.values
        if not chunk.runs:
            return
        senders = [sender for sender in incoming.messages if sender not in incoming.unread]
        for order, sender in enumerate(senders):
            near = buffers.on_device_of(incoming.messages[sender][chunk.coded], values[0])
            last = order + 1 == len(senders) and incoming.divisor == 1
            for run in chunk.runs:
                codec, target = bucket.pieces[run.place].codec, values[run.place][run.values]
                add = order > 0 or (incoming.add and codec != PLAIN)
                try:
                    codec.decode(near[chunk.within(run)], target, add, last)
                except ValueError as error:
                    self.fault(bucket, self.members[sender], str(error))
        if incoming.divisor > 1:
            for run in chunk.runs:
                values[run.place][run.values].div_(incoming.divisor)
        buffers.synchronize(values[0])
        self.tally.decode += time.perf_counter() - begin

    def _header(self, bucket: Bucket, sender: int, message: Tensor, summed: bool) -> MessageHeader:
        number, length = 2 * bucket.index + summed, message.numel() - HEADER
        return MessageHeader(self.state.codec, self.members[sender], number, bucket.step, length)


def _cut(flats: Sequence[Tensor], parts: Sequence[slice]) -> list[Tensor]:
    return [flat[part] for flat, part in zip(flats, parts, strict=True)]
