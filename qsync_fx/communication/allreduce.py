"""All-reduce (mean) of compressed buckets: reduce-scatter followed by all-gather.

With two ranks, or with a codec that sets `gathered`, a single all-gather replaces both exchanges:
each rank decodes and sums all messages itself. Messages are sent in chunks, so that encoding,
transfer and decoding overlap.

Invariant: all ranks end with the same bits. Ranks sum in rank order, and a sender decodes its own
bytes too, so that all ranks decode the same bytes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qsync_fx.communication import point_to_point
from qsync_fx.communication.bucket import Bucket, gathered, giving, scattering, volumes
from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.compressor_state import CompressorState
from qsync_fx.communication.point_to_point import (
    HEADER,
    IncomingMessages,
    MessageHeader,
    OutgoingMessage,
    PendingTransfers,
    stretches,
)
from qsync_fx.communication.statistics import CommunicationStatistics


@dataclass
class Reducer:
    """All-reduce of one bucket after another.

    Attributes:
        group: process group that no other code uses.
        state: error feedback, random streams and step of the compression.
        members: ranks to average over, in summation order; all ranks by default.
        tally: statistics of this rank.
        faults: messages that could not be read since the last `settle`.
        digest: CRC-32 of the results of the measured buckets.
        finite: whether all results of this step are finite; set by callers that check it.
        used: whether `finite` was true on all ranks in the last step.
    """

    group: Any
    state: CompressorState
    members: tuple[int, ...] = ()
    tally: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    faults: list[str] = field(default_factory=list)
    digest: int = 0
    finite: bool = True
    used: bool = True
    _memory: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.state.world))
        self._own = self.members.index(self.state.rank)

    def reduce(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by their mean over the members.

        Raises:
            RankError: a rank is gone.
        """
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
        full = gathered([piece.codec for piece in bucket.pieces], len(self.members))
        for is_whole, exchanged in ((True, self._one_exchange), (False, self._two_exchanges)):
            owned = [index for index, item in enumerate(full) if item == is_whole]
            if owned:
                exchanged(
                    replace(bucket, pieces=[bucket.pieces[index] for index in owned]),
                    [flats[index] for index in owned],
                )

    def scatter(self, bucket: Bucket) -> None:
        """Reduce-scatter a bucket in place: this rank's shards get the mean, all others zeros.

        Raises:
            RankError: a rank is gone.
        """
        flats = self.flats(bucket)
        self._sum(bucket, flats)
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            owned = piece.part(self._own)
            flat[: owned.start].zero_()
            flat[owned.stop :].zero_()
        self.put_back(bucket, flats)
        self._count(*scattering(bucket.pieces, self._own))

    def give(
        self, bucket: Bucket, owned: Sequence[Tensor], flats: Sequence[Tensor], onto: Sequence[bool]
    ) -> None:
        """All-gather the shards of all ranks into full parameters.

        Args:
            owned: this rank's shards, FP32, one for each piece. The codec of the piece encodes them,
                and this rank decodes its own bytes too.
            flats: output, FP32, one full tensor for each piece in coding order.
            onto: for each piece, whether the shards are added to `flats` or replace its values.

        Raises:
            RankError: a rank is gone.
        """
        self._give(bucket, owned, flats, onto)
        self._count(*giving(bucket.pieces, self._own, len(self.members)))

    def end(self, bucket: Bucket, raw: int, theory: float) -> None:
        """Count a reduced bucket, and add its result to the digest if it is measured."""
        self._count(raw, theory)
        if bucket.measured:
            # The payload of a NaN differs between instruction sets.
            made = torch.where(bucket.values.isnan(), torch.nan, bucket.values)
            self.digest = zlib.crc32(made.cpu().numpy().tobytes(), self.digest)

    def _count(self, raw: int, theory: float) -> None:
        self.tally.buckets += 1
        self.tally.raw += raw
        self.tally.theory += theory

    def fault(self, bucket: Bucket, sender: int, description: str) -> None:
        """Record an unreadable message of a member (index); `settle` raises it on all ranks."""
        self.faults.append(
            point_to_point.unread(self.state.rank, self.members[sender], bucket.about, description)
        )

    def settle(
        self, step: int, compared: bool = False, reported: str = point_to_point.GRADIENTS
    ) -> None:
        """End a step after its last bucket.

        Args:
            compared: whether the comparison of digests is counted in the statistics.
            reported: error message for different digests, with two placeholders for ranks.

        Raises:
            RankError: on all ranks, if a rank could not read a message or got another result.
        """
        self.tally.steps += 1
        if self.state.world == 1:
            return
        faults, digest, finite = self.faults, self.digest, self.finite
        self.faults, self.digest, self.finite = [], 0, True
        rank, world = self.state.rank, self.state.world
        self.used = point_to_point.settle(
            self.group, rank, world, step, faults, digest, finite, reported
        )
        self.state.settle(self.used)
        self.tally.checks += compared

    def flats(self, bucket: Bucket) -> list[Tensor]:
        """Return the values of each piece in coding order; copies count as encoding time."""
        begin = time.perf_counter()
        room = self._order(bucket, size) if (size := bucket.reordered) else None
        flats = bucket.flats(room)
        self.tally.encode += time.perf_counter() - begin
        return flats

    def put_back(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        begin = time.perf_counter()
        bucket.put_back(flats)
        self.tally.decode += time.perf_counter() - begin

    def _one_exchange(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        parts = [slice(0, piece.size) for piece in bucket.pieces]
        mine = self._given(bucket, flats, parts, "mine")
        self._pass(
            bucket, [(mine, self._others)], [self._mean_of_all(bucket, mine, "all of", flats)]
        )
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            piece.codec.settle(flat)

    def _two_exchanges(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        self._sum(bucket, flats)
        owned = [
            flat[piece.part(self._own)] for piece, flat in zip(bucket.pieces, flats, strict=True)
        ]
        self._give(bucket, owned, flats, [False] * len(flats))

    def _sum(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Write the mean into this rank's shards."""
        inputs = []
        for owner in range(len(self.members)):
            parts = [piece.part(owner) for piece in bucket.pieces]
            made = self._given(bucket, _cut(flats, parts), parts, f"to {owner}")
            inputs.append((made, [owner] if owner != self._own else []))
        mine, _ = inputs[self._own]
        self._pass(
            bucket, inputs, [self._mean_of_all(bucket, mine, "from", _cut(flats, mine.parts))]
        )

    def _give(
        self, bucket: Bucket, owned: Sequence[Tensor], flats: Sequence[Tensor], onto: Sequence[bool]
    ) -> None:
        parts = {
            owner: [piece.part(owner) for piece in bucket.pieces]
            for owner in range(len(self.members))
        }
        mine = self._given(bucket, owned, parts[self._own], "mean", summed=True)
        used = []
        for owner, result in parts.items():
            cuts, memory = mine.stretches, mine.memory
            if owner != self._own:
                cuts = stretches(bucket.pieces, result)
                memory = self._memory_for(bucket, f"mean of {owner}", cuts[-1].wire.stop)
            used.append(
                IncomingMessages(cuts, {owner: memory}, _cut(flats, result), summed=True, onto=onto)
            )
        self._pass(bucket, [(mine, self._others)], used)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self.members)) if peer != self._own]

    def _mean_of_all(
        self, bucket: Bucket, mine: OutgoingMessage, name: str, values: Sequence[Tensor]
    ) -> IncomingMessages:
        """Return the messages of all members for the parts of `mine`; decoding averages them."""
        theirs = {
            peer: self._memory_for(bucket, f"{name} {peer}", mine.memory.numel())
            for peer in self._others
        }
        messages = {**theirs, self._own: mine.memory}
        ranked = {member: messages[member] for member in sorted(messages)}
        return IncomingMessages(mine.stretches, ranked, values, over=len(self.members))

    def _given(
        self,
        bucket: Bucket,
        values: Sequence[Tensor],
        parts: Sequence[slice],
        name: str,
        summed: bool = False,
    ) -> OutgoingMessage:
        """Return an outgoing message with room for the given parts of a bucket."""
        cuts = stretches(bucket.pieces, parts)
        message = self._memory_for(bucket, name, cuts[-1].wire.stop)
        self._head(bucket, self._own, message, summed).write(message)
        residuals = [
            None if part.start == part.stop else self.state.residual(piece, part, summed)
            for piece, part in zip(bucket.pieces, parts, strict=True)
        ]
        return OutgoingMessage(message, cuts, parts, values, residuals, summed)

    def _pass(
        self,
        bucket: Bucket,
        value: Sequence[tuple[OutgoingMessage, Sequence[int]]],
        used: Sequence[IncomingMessages],
    ) -> None:
        """Send messages and decode incoming ones, chunk by chunk."""
        begin, coding = time.perf_counter(), self.tally.coding
        flight = PendingTransfers(self.group, bucket.about)
        for item in used:
            for sender, message in item.messages.items():
                for number, stretch in enumerate(item.stretches):
                    if sender != self._own:
                        flight.expect(self.members[sender], message[stretch.wire], number)
        for number in range(max(len(made.stretches) for made, _ in value)):
            for made, peers in value:
                if number < len(made.stretches):
                    made.encode(bucket, number, self.state, self.tally)
                    for peer in peers:
                        flight.send(
                            self.members[peer], made.memory[made.stretches[number].wire], number
                        )
        for number in range(max(len(item.stretches) for item in used)):
            for item in used:
                if number < len(item.stretches):
                    for sender in item.messages:
                        if sender != self._own:
                            flight.arrived(self.members[sender], number)
                    if number == 0:
                        item.look(
                            lambda *selected: self._head(bucket, *selected),
                            lambda *description: self.fault(bucket, *description),
                        )
                    item.decode(
                        bucket,
                        number,
                        self.tally,
                        lambda *description: self.fault(bucket, *description),
                    )
        flight.end()
        self.tally.transfer += time.perf_counter() - begin - (self.tally.coding - coding)
        self.tally.wire += sum(made.memory.numel() * len(peers) for made, peers in value)

    def _head(self, bucket: Bucket, sender: int, message: Tensor, summed: bool) -> MessageHeader:
        subject = point_to_point.hash_of(self.state.codec)
        return MessageHeader(
            subject,
            self.members[sender],
            2 * bucket.index + summed,
            bucket.step,
            message.numel() - HEADER,
        )

    def _memory_for(self, bucket: Bucket, name: str, nbytes: int) -> Tensor:
        """Return a host buffer that is reused across steps; allocation costs more than a copy."""
        key = (bucket.index, name)
        result = self._memory.get(key)
        if result is None or result.numel() != nbytes:
            result = self._memory[key] = buffers.host(nbytes, self.state.device)
        return result

    def _order(self, bucket: Bucket, size: int) -> Tensor:
        """Return a reused FP32 buffer for `size` reordered values, on the bucket's device."""
        key = (bucket.index, "order")
        result = self._memory.get(key)
        if result is None or result.numel() != size:
            result = self._memory[key] = torch.zeros(
                size, dtype=torch.float32, device=bucket.values.device
            )
        return result


def _cut(flats: Sequence[Tensor], parts: Sequence[slice]) -> list[Tensor]:
    return [flat[part] for flat, part in zip(flats, parts, strict=True)]
