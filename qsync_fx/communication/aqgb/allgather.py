"""AQGB's reduction of a bucket: an all-gather in segments, each with its own bit levels.

Only the sender knows the length of a message, so it sends a header first, twice, because no other
value verifies the length. Once all headers have arrived, all ranks take part, and the time from
then on measures the link even if a rank was late. The header of a segment precedes the message of
the segment before, so that the link waits neither for headers nor for codecs.

Invariant: all ranks end with the same bits: each decodes its own bytes too, and sums in rank order.
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
"""Upper bound of segments in a bucket; headers combine bucket and segment in one number."""


@dataclass(frozen=True)
class ByteRun:
    """Consecutive values with the same level.

    Attributes:
        begin, end: positions in the bucket.
        bits: the level.
        residual: error feedback of the values; None without.
    """

    begin: int
    end: int
    bits: int
    residual: Tensor | None


@dataclass
class _Segment:
    """Segment of a bucket, whose levels are chosen together.

    Attributes:
        number: index in the bucket.
        begin, end: positions in the bucket.
        heads: both copies of the header, by rank.
        runs: levels of this rank's values.
        messages: coded bytes by rank.
        sent: time when this rank's message was sent, in seconds of the controller's clock.
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
        """Tags of the header and the message."""
        return 2 * self.number, 2 * self.number + 1


@dataclass
class Gatherer:
    """Reducer of buckets for AQGB, with the interface of `Reducer`.

    Attributes:
        codec: codec whose levels are chosen.
        reducer: provides process group, state and statistics.
        controller: provides the ratio of bytes to FP32 bytes.
    """

    codec: Adaptive
    reducer: Reducer
    controller: Controller
    _memory: dict[str, Tensor] = field(default_factory=dict)
    _arrived: float = 0.0

    def reduce(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by their mean over ranks.

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
        """Return the segments of a bucket, and post the receives of their headers."""
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
        """Choose levels, encode, and send the header with the length of the message."""
        reducer, values = self.reducer, bucket.values[segment.begin : segment.end]
        started = time.perf_counter()
        segment.runs = self._runs(bucket, segment.begin, segment.end)
        inputs = _given(values, segment.runs, segment.begin) if bucket.measured else None
        # Three buffers: one message is decoded, one is in flight, and this one is encoded.
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
        """Send the message once the headers of all other ranks are here; post their receives."""
        reducer, most = self.reducer, _most(segment.end - segment.begin, len(bucket.pieces))
        for peer in self._others:
            flight.arrived(peer, segment.tags[0])
            result = segment.heads[peer]
            length = point_to_point.length_of(result[HEADER:])
            fault = self._head(bucket, segment, peer, length).fault(result[:HEADER])
            if fault is None and length > most:
                fault = f"its length is {length}, but at most {most} is valid"
            if fault is not None:
                reducer.fault(bucket, peer, fault)
            # Receive as many bytes as arrive if the length is unknown.
            memory = self._bytes(f"from {peer}, {segment.number % 2}", most)
            segment.messages[peer] = memory[: most if fault is not None else length]
            flight.expect(peer, segment.messages[peer], segment.tags[1])
        segment.sent = self.controller.clock()
        for peer in self._others:
            flight.send(peer, segment.messages[reducer.state.rank], segment.tags[1])

    def _take(self, flight: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        """Decode and sum the messages of a segment once they have arrived."""
        reducer = self.reducer
        for peer in self._others:
            flight.arrived(peer, segment.tags[1])
            flight.gone(peer, segment.tags[1])
        # Measure from the time the link was free; its use follows the direction with more bytes.
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
        """Return the levels of the values between `begin` and `end`, in order."""
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
        """Write the sum of all messages, in rank order, into `values`."""
        begin = time.perf_counter()
        for sender in range(self.reducer.state.world):
            try:
                self.codec.decode(received[sender], values, add=sender > 0)
            except ValueError:
                self.reducer.fault(bucket, sender, f"its levels do not fit {values.numel()} values")
        self.reducer.tally.decode += time.perf_counter() - begin

    def _bytes(self, name: str, nbytes: int) -> Tensor:
        """Return a host buffer that is reused; allocation costs more than a copy."""
        result = self._memory.get(name)
        if result is None or result.numel() < nbytes:
            result = self._memory[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return result[:nbytes]


def _placed(bucket: Bucket) -> Iterator[tuple[ParameterSlice, int]]:
    """Yield the parameters of a bucket and their positions in it, in memory order."""
    places = [int(g.storage_offset() - bucket.values.storage_offset()) for g in bucket.gradients]
    yield from sorted(zip(bucket.pieces, places, strict=True), key=lambda placed: placed[1])


def _given(values: Tensor, runs: Sequence[ByteRun], begin: int) -> Tensor:
    """Return the values to send: gradients plus error feedback."""
    inputs = values.clone()
    for run in runs:
        if run.residual is not None:
            inputs[run.begin - begin : run.end - begin] += run.residual
    return inputs


def _most(values: int, pieces: int) -> int:
    """Return an upper bound of the bytes for this many values and parameters, at any levels."""
    return Truncated(LEVELS[-1]).nbytes(values) + 16 * (pieces + 1)
