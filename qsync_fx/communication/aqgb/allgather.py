"""AQGB's way of a bucket: every rank sends all of it to all others, in levels that it chooses segment by segment, and all sum what came.

How long a message is its sender alone knows, so a head goes before it, written twice, as nothing else says whether its length is right.
When all heads are here all ranks are, and the time from then on is that of the link, whoever came late. The head of a segment goes before
the message of the one before it, so that a message is awaited when that one has come, and the link need not wait: for the heads, nor for
codecs, which work while messages are under way.

Invariant: all ranks end with the same bits: each takes of its own values what it has sent, and sums are taken in the order of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qsync_fx.communication import point_to_point
from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.aqgb.bit_allocation import mixed
from qsync_fx.communication.aqgb.controller import Controller
from qsync_fx.communication.bucket import Bucket, ParameterSlice
from qsync_fx.communication.codecs import PLAIN, Draw
from qsync_fx.communication.codecs.truncation import LEVELS, Adaptive, Truncated
from qsync_fx.communication.point_to_point import HEADER, MessageHeader, PendingTransfers

_HEADS = 2 * HEADER
_SEGMENTS = 2**12
"""More than a bucket has: the head of a message says which bucket's it is, and which segment's."""


@dataclass(frozen=True)
class ByteRun:
    """Values that go in one level.

    Attributes:
        begin, end: their places in the bucket.
        bits: the level.
        residual: what was left of them; None where that is not sent.
    """

    begin: int
    end: int
    bits: int
    residual: Tensor | None


@dataclass
class _Segment:
    """Values of a bucket whose levels are chosen at once.

    Attributes:
        number: which it is.
        begin, end: their places in the bucket.
        heads: bytes that say what messages there are, by rank.
        runs: how they go from here.
        messages: the bytes that they go in, by rank.
        sent: when its message was sent.
    """

    number: int
    begin: int
    end: int
    heads: Mapping[int, Tensor]
    runs: list[ByteRun] = field(default_factory=list)
    messages: dict[int, Tensor] = field(default_factory=dict)
    sent: float = 0.0

    @property
    def tags(self) -> tuple[int, int]:
        """What tells its head and its message from others."""
        return 2 * self.number, 2 * self.number + 1


@dataclass
class Gatherer:
    """Reduces buckets as a `Reducer` does.

    Attributes:
        codec: what levels are chosen for.
        reducer: whose group, state and sums it shares.
        controller: says what ratio is wanted.
    """

    codec: Adaptive
    reducer: Reducer
    controller: Controller
    _memory: dict[str, Tensor] = field(default_factory=dict)
    _arrived: float = 0.0

    def reduce(self, bucket: Bucket) -> None:
        """Puts the mean over ranks in the place of a bucket's values.

        Raises:
            RankError: a rank is gone.
        """
        tally, size = self.reducer.tally, bucket.values.numel()
        started, coding = time.perf_counter(), tally.coding
        flight = PendingTransfers(self.reducer.group, bucket.about)
        segments = self._segments(flight, size)
        stages = (self._announce, self._send, self._take)
        for turn in range(len(segments) + len(stages) - 1):
            for late, stage in enumerate(stages):
                if 0 <= turn - late < len(segments):
                    stage(flight, bucket, segments[turn - late])
        flight.end()
        bucket.values.div_(self.reducer.state.world)
        tally.transfer += time.perf_counter() - started - (tally.coding - coding)
        others = len(self._others)
        theory = (
            sum(
                item.bits * (item.end - item.begin) for segment in segments for item in segment.runs
            )
            / 8
        )
        self.reducer.end(bucket, others * PLAIN.nbytes(size), others * theory)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(self.reducer.state.world) if peer != self.reducer.state.rank]

    def _segments(self, flight: PendingTransfers, size: int) -> list[_Segment]:
        """Returns the segments of a bucket, whose heads are received from now on."""
        step = max(self.codec.segment // 4, -(-size // _SEGMENTS))
        cuts = range(0, size, step)
        heads = {
            rank: torch.split(self._bytes(f"heads of {rank}", len(cuts) * _HEADS), _HEADS)
            for rank in range(self.reducer.state.world)
        }
        result = []
        for number, begin in enumerate(cuts):
            owned = {rank: memory[number] for rank, memory in heads.items()}
            result.append(_Segment(number, begin, min(begin + step, size), owned))
            for peer in self._others:
                flight.expect(peer, owned[peer], result[-1].tags[0])
        return result

    def _announce(self, flight: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        """Chooses levels, encodes, and sends a head, which says how long the message will be."""
        reducer, values = self.reducer, bucket.values[segment.begin : segment.end]
        started = time.perf_counter()
        segment.runs = self._runs(bucket, segment.begin, segment.end)
        inputs = _given(values, segment.runs, segment.begin) if bucket.measured else None
        # One is taken, one is under way, and this one.
        memory = self._bytes(
            f"message {segment.number % 3}", _most(values.numel(), len(bucket.pieces))
        )
        message = segment.messages[reducer.state.rank] = self._encoded(
            bucket.values, segment.runs, memory
        )
        if inputs is not None:
            reducer.tally.measure(inputs, self.codec, message)
        head = segment.heads[reducer.state.rank]
        for half in torch.split(head, HEADER):
            self._head(bucket, segment, reducer.state.rank, message.numel()).write(half)
        reducer.tally.encode += time.perf_counter() - started
        for peer in self._others:
            flight.send(peer, head, segment.tags[0])
        reducer.tally.wire += (head.numel() + message.numel()) * len(self._others)

    def _send(self, flight: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        """Sends a message once the heads of all others are here, and receives theirs."""
        reducer, most = self.reducer, _most(segment.end - segment.begin, len(bucket.pieces))
        for peer in self._others:
            flight.arrived(peer, segment.tags[0])
            result = segment.heads[peer]
            length = point_to_point.length_of(result[HEADER:])
            fault = self._head(bucket, segment, peer, length).fault(result[:HEADER])
            if fault is None and length > most:
                fault = f"its length is {length}, and can be {most}"
            if fault is not None:
                reducer.fault(bucket, peer, fault)
            # Of a message whose length is not known as much is taken as comes.
            memory = self._bytes(f"from {peer}, {segment.number % 2}", most)
            segment.messages[peer] = memory[: most if fault is not None else length]
            flight.expect(peer, segment.messages[peer], segment.tags[1])
        segment.sent = self.controller.clock()
        for peer in self._others:
            flight.send(peer, segment.messages[reducer.state.rank], segment.tags[1])

    def _take(self, flight: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        """Sums the messages of a segment when they are here."""
        reducer = self.reducer
        for peer in self._others:
            flight.arrived(peer, segment.tags[1])
            flight.gone(peer, segment.tags[1])
        # From when it had nothing before it on the link, which was in use for the longer of both ways.
        now, received = (
            self.controller.clock(),
            [segment.messages[peer].numel() for peer in self._others],
        )
        seconds, self._arrived = now - max(segment.sent, self._arrived), now
        carried = max(segment.messages[reducer.state.rank].numel(), sum(received) / len(received))
        levels: Counter[int] = Counter()
        for run in segment.runs:
            levels[run.bits] += run.end - run.begin
        self.controller.carried(PLAIN.nbytes(segment.end - segment.begin), carried, seconds, levels)
        self._decode(bucket, segment.messages, bucket.values[segment.begin : segment.end])

    def _head(self, bucket: Bucket, segment: _Segment, sender: int, length: int) -> MessageHeader:
        subject = point_to_point.hash_of(self.reducer.state.codec)
        return MessageHeader(
            subject, sender, bucket.index * _SEGMENTS + segment.number, bucket.step, length
        )

    def _runs(self, bucket: Bucket, begin: int, end: int) -> list[ByteRun]:
        """Returns in which level which values go, in their order."""
        shares = mixed(self.controller.ratio)
        above = max(shares)
        cut = begin + (round(shares[above] * (end - begin)) if len(shares) > 1 else 0)
        result: list[ByteRun] = []
        for piece, start in _placed(bucket):
            for first, last, bits in ((begin, cut, above), (cut, end, min(shares))):
                a, b = max(first, start), min(last, start + piece.size)
                if a >= b:
                    continue
                residual = self.reducer.state.residual(
                    piece, slice(a - start, b - start), summed=False
                )
                bits = bits if isinstance(piece.codec, Adaptive) else LEVELS[-1]
                if (
                    residual is None
                    and result
                    and result[-1].residual is None
                    and result[-1].bits == bits
                ):
                    result[-1] = replace(result[-1], end=b)
                else:
                    result.append(ByteRun(a, b, bits, residual))
        return result

    def _encoded(self, values: Tensor, runs: Sequence[ByteRun], message: Tensor) -> Tensor:
        index = 0
        for run in runs:
            codec = Truncated(run.bits, self.codec.partition)
            nbytes = codec.nbytes(run.end - run.begin)
            codec.encode(
                values[run.begin : run.end], message[index : index + nbytes], Draw(), run.residual
            )
            index += nbytes
        return message[:index]

    def _decode(self, bucket: Bucket, received: Mapping[int, Tensor], values: Tensor) -> None:
        """Sums messages in the order of ranks into these values."""
        begin = time.perf_counter()
        for sender in range(self.reducer.state.world):
            try:
                self.codec.decode(received[sender], values, add=sender > 0)
            except ValueError:
                self.reducer.fault(
                    bucket, sender, f"its levels are not those of {values.numel()} values"
                )
        self.reducer.tally.decode += time.perf_counter() - begin

    def _bytes(self, name: str, nbytes: int) -> Tensor:
        """Returns bytes that stay: new memory costs more than it takes to fill it."""
        result = self._memory.get(name)
        if result is None or result.numel() < nbytes:
            result = self._memory[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return result[:nbytes]


def _placed(bucket: Bucket) -> Iterator[tuple[ParameterSlice, int]]:
    """Yields the parameters of a bucket and where they begin in it, in the order in which they lie there."""
    places = [int(g.storage_offset() - bucket.values.storage_offset()) for g in bucket.gradients]
    yield from sorted(zip(bucket.pieces, places, strict=True), key=lambda placed: placed[1])


def _given(values: Tensor, runs: Sequence[ByteRun], begin: int) -> Tensor:
    """Returns what is to be sent: values, and what was left of them before."""
    inputs = values.clone()
    for run in runs:
        if run.residual is not None:
            inputs[run.begin - begin : run.end - begin] += run.residual
    return inputs


def _most(values: int, pieces: int) -> int:
    """Returns more bytes than so many values of so many parameters take, whatever the levels and wherever a rank cuts them."""
    return Truncated(LEVELS[-1]).nbytes(values) + 16 * (pieces + 1)
