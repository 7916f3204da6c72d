"""AQGB (X. Liu et al., 2022): an all-gather in segments, whose bit levels follow the bandwidth.

Each block of gradients should be delivered before the next one is ready, and the last before a
deadline. Invariant: all ranks end with the same bits, though each decides for its own messages.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import Bucket
from qsync_fx.communication.codecs import PLAIN, Draw
from qsync_fx.communication.codecs.truncation import LEVELS, Adaptive, Truncated
from qsync_fx.communication.message_header import HEADER, MessageHeader, length_of
from qsync_fx.communication.point_to_point import PendingTransfers
from qsync_fx.communication.statistics import BitLevelSummary

_FULL: Final = 32
Clock = Callable[[], float]


@dataclass(frozen=True)
class BitDecision:
    """Decision for a block."""

    time: float  # seconds, when the block was ready
    undelivered: float  # FP32 bytes
    made: float  # b1 of the paper: bytes/s of new gradients
    drained: float  # b2 of the paper: bytes/s of the link
    ratio: float  # sent bytes to FP32 bytes, from 0.375 to 1


def decide(time: float, undelivered: float, gap: float, drained: float) -> BitDecision:
    """Return the decision for a block: b2 / b1 is the ratio of sent bytes to FP32 bytes.

    `gap` is the predicted time until the next block, in seconds.
    """
    made = undelivered / gap
    ratio = min(1.0, max(LEVELS[0] / _FULL, drained / made))
    return BitDecision(time, undelivered, made, drained, ratio)


def mixed(ratio: float) -> dict[int, float]:
    """Return the shares of one or two adjacent levels so that their bytes are `ratio` of FP32."""
    bits = ratio * _FULL
    below = max(level for level in LEVELS if level <= max(bits, LEVELS[0]))
    above = min(level for level in LEVELS if level >= min(bits, LEVELS[-1]))
    if below == above:
        return {below: 1.0}
    share = (bits - below) / (above - below)
    return {below: 1 - share, above: share}


_STEPS: Final = 5  # past steps for the prediction
_LOG: Final = 10_000
_SHORTEST: Final = 1e-6  # shortest time in seconds, so that simultaneous blocks have a finite rate


@dataclass(frozen=True)
class AqgbEntry:
    """Log entry of a block."""

    step: int
    block: int
    size: int  # FP32 bytes
    gap: float | None  # predicted seconds until the next block, if known
    decision: BitDecision | None  # its time is relative to the first block; None for FP32

    @property
    def ratio(self) -> float:
        return 1.0 if self.decision is None else self.decision.ratio


@dataclass
class _Step:
    number: int
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    needed: float | None = None
    wire: float = 0.0
    busy: float = 0.0


class Controller:
    """Controller of one rank: measures gradients and link, and sets the ratio of sent bytes.

    The time from a block to the next one, or to the end of the backward pass, is the median of
    recent steps with the same blocks; until one is measured, everything is FP32.
    """

    def __init__(
        self, grace: float = 0.0, elapsed: bool = False, clock: Clock = time.perf_counter
    ) -> None:
        self.ratio, self.clock = 1.0, clock
        self.log: deque[AqgbEntry] = deque(maxlen=_LOG)
        self._grace, self._elapsed = grace, elapsed
        self._lock = threading.Lock()
        self._undelivered = 0
        self._rate: float | None = None
        self._past: deque[tuple[list[int], list[float]]] = deque(maxlen=_STEPS)
        self._now, self._decisions = _Step(-1), 0
        self._levels: Counter[int] = Counter()

    def came(self, step: int, size: int) -> None:
        """Record a block of `size` FP32 bytes that is ready, and decide its ratio."""
        with self._lock:
            now = self.clock()
            if step != self._now.number:
                self._end()
                self._now = _Step(step)
            self._now.sizes.append(size)
            self._now.times.append(now)
            self._undelivered += size
            gap, drained = self._predicted_gap(), self._drained(now)
            decision = None
            if gap is not None and drained is not None:
                decision = decide(now - self._now.times[0], self._undelivered, gap, drained)
                self._decisions += 1
            self.log.append(AqgbEntry(step, len(self._now.sizes) - 1, size, gap, decision))
            self.ratio = self.log[-1].ratio

    def carried(
        self, delivered: int, wire: float, seconds: float, levels: Mapping[int, int]
    ) -> None:
        """Record a transfer of `delivered` FP32 bytes as `wire` bytes, and its values by bits."""
        with self._lock:
            self._undelivered -= delivered
            self._now.wire += wire
            self._now.busy += seconds
            self._levels.update(levels)

    def needed(self) -> None:
        """Record the end of the backward pass, which now waits for all blocks."""
        with self._lock:
            if self._now.needed is None:
                self._now.needed = self.clock()

    def adapted(self) -> BitLevelSummary:
        with self._lock:
            values = self._levels.total()
            levels = {bits: count / values for bits, count in self._levels.items()}
            return BitLevelSummary(self._decisions, levels, self._last_rate())

    def saved(self) -> dict[str, Any]:
        with self._lock:
            self._end()
            past = [[list(sizes), list(gaps)] for sizes, gaps in self._past]
            return {"rate": self._rate, "past": past}

    def load(self, saved: Mapping[str, Any]) -> None:
        with self._lock:
            self._rate = saved.get("rate")
            past = ((list(sizes), list(gaps)) for sizes, gaps in saved.get("past", ()))
            self._past, self._now = deque(past, maxlen=_STEPS), _Step(-1)

    def _end(self) -> None:
        self._rate = self._last_rate()
        ended, self._now = self._now, _Step(-1)
        if ended.needed is not None and ended.times:
            until = [*ended.times[1:], max(ended.needed, ended.times[-1]) + self._grace]
            gaps = [end - begin for begin, end in zip(ended.times, until, strict=True)]
            self._past.append((ended.sizes, gaps))

    def _predicted_gap(self) -> float | None:
        sizes, count = self._now.sizes, len(self._now.sizes)
        gaps = [gaps[count - 1] for past, gaps in self._past if past[:count] == sizes]
        return max(statistics.median(gaps), _SHORTEST) if gaps else None

    def _drained(self, now: float) -> float | None:
        """Return the link rate of this step in bytes/s; before a transfer, of the last step."""
        step = self._now
        if self._elapsed and step.wire > 0:
            return step.wire / max(now - step.times[0], _SHORTEST)
        return self._last_rate()

    def _last_rate(self) -> float | None:
        return self._now.wire / self._now.busy if self._now.busy > 0 else self._rate


_HEADERS = 2 * HEADER
_SEGMENTS = 2**12
"""Upper bound of segments in a bucket; headers combine bucket and segment in one number."""


@dataclass(frozen=True)
class ByteRun:
    """Consecutive values with the same level, and their error feedback, if any."""

    begin: int
    end: int
    bits: int
    residual: Tensor | None


@dataclass
class _Segment:
    """Segment of a bucket, whose levels are chosen together; headers and messages are by rank."""

    number: int
    begin: int
    end: int
    headers: Sequence[Tensor]
    runs: list[ByteRun] = field(default_factory=list)
    messages: dict[int, Tensor] = field(default_factory=dict)
    sent: float = 0.0  # time of this rank's message, in seconds of the controller's clock

    @property
    def tags(self) -> tuple[int, int]:
        return 2 * self.number, 2 * self.number + 1


@dataclass
class Gatherer:
    """Reducer of buckets for AQGB, with the interface of `Reducer`.

    A header with the length of the message is sent before the previous message, so that the link
    does not wait for it: twice, as no other value verifies the length. Once all headers are here,
    the time from then on measures the link even if a rank was late.
    """

    codec: Adaptive
    reducer: Reducer
    controller: Controller
    _arrived: float = 0.0

    def __post_init__(self) -> None:
        self._rank, self._world = self.reducer.state.rank, self.reducer.state.world
        self._others = [peer for peer in range(self._world) if peer != self._rank]

    def reduce(self, bucket: Bucket) -> None:
        tally, size = self.reducer.tally, bucket.values.numel()
        started, coding = time.perf_counter(), tally.coding
        transfers = PendingTransfers(self.reducer.group, bucket.about)
        segments = self._segments(transfers, size)
        stages = (self._announce, self._send, self._receive)
        for turn in range(len(segments) + len(stages) - 1):
            for delay, stage in enumerate(stages):
                if 0 <= turn - delay < len(segments):
                    stage(transfers, bucket, segments[turn - delay])
        transfers.end()
        bucket.values.div_(self._world)
        tally.transfer += time.perf_counter() - started - (tally.coding - coding)
        runs = [run for segment in segments for run in segment.runs]
        theory = sum(run.bits * (run.end - run.begin) for run in runs) / 8
        others = len(self._others)
        self.reducer.end(bucket, others * PLAIN.nbytes(size), others * theory)

    def _segments(self, transfers: PendingTransfers, size: int) -> list[_Segment]:
        step = max(self.codec.segment // 4, -(-size // _SEGMENTS))
        cuts = range(0, size, step)
        nbytes, result = len(cuts) * _HEADERS, []
        memory = [self._buffer(f"headers of {rank}", nbytes) for rank in range(self._world)]
        for number, begin in enumerate(cuts):
            headers = [item[number * _HEADERS : (number + 1) * _HEADERS] for item in memory]
            result.append(_Segment(number, begin, min(begin + step, size), headers))
            for peer in self._others:
                transfers.expect(peer, headers[peer], result[-1].tags[0])
        return result

    def _announce(self, transfers: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        tally, values = self.reducer.tally, bucket.values[segment.begin : segment.end]
        started = time.perf_counter()
        segment.runs = self._runs(bucket, segment.begin, segment.end)
        full = values.clone() if bucket.measured else values
        for run in segment.runs:
            if bucket.measured and run.residual is not None:
                full[run.begin - segment.begin : run.end - segment.begin] += run.residual
        # Three buffers: one message is decoded, one is in flight, and this one is encoded.
        most = _most_bytes(values.numel(), len(bucket.pieces))
        message = self._encode(bucket, segment, self._buffer(f"message {segment.number % 3}", most))
        segment.messages[self._rank] = message
        if bucket.measured:
            tally.measure(full, self.codec, message)
        headers = segment.headers[self._rank]
        for header in torch.split(headers, HEADER):
            self._header(bucket, segment, self._rank, message.numel()).write(header)
        tally.encode += time.perf_counter() - started
        for peer in self._others:
            transfers.send(peer, headers, segment.tags[0])
        tally.wire += (headers.numel() + message.numel()) * len(self._others)

    def _send(self, transfers: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        """Send the message once the headers of all other ranks are here; post their receives."""
        most = _most_bytes(segment.end - segment.begin, len(bucket.pieces))
        for peer in self._others:
            transfers.wait_received(peer, segment.tags[0])
            headers = segment.headers[peer]
            length = length_of(headers[HEADER:])
            fault = self._header(bucket, segment, peer, length).fault(headers[:HEADER])
            if fault is None and length > most:
                fault = f"its length is {length}, but at most {most} is valid"
            memory = self._buffer(f"from {peer}, {segment.number % 2}", most)
            if fault is not None:
                self.reducer.fault(bucket.about, peer, fault)
                length = most  # receive as many bytes as arrive
            segment.messages[peer] = memory[:length]
            transfers.expect(peer, segment.messages[peer], segment.tags[1])
        segment.sent = self.controller.clock()
        for peer in self._others:
            transfers.send(peer, segment.messages[self._rank], segment.tags[1])

    def _receive(self, transfers: PendingTransfers, bucket: Bucket, segment: _Segment) -> None:
        for peer in self._others:
            transfers.wait_received(peer, segment.tags[1])
            transfers.wait_sent(peer, segment.tags[1])
        # Measure from the time the link was free; its use follows the direction with more bytes.
        now = self.controller.clock()
        received = [segment.messages[peer].numel() for peer in self._others]
        seconds, self._arrived = now - max(segment.sent, self._arrived), now
        carried = max(segment.messages[self._rank].numel(), sum(received) / len(received))
        levels: Counter[int] = Counter()
        for run in segment.runs:
            levels[run.bits] += run.end - run.begin
        self.controller.carried(PLAIN.nbytes(segment.end - segment.begin), carried, seconds, levels)
        self._decode(bucket, segment)

    def _header(self, bucket: Bucket, segment: _Segment, sender: int, length: int) -> MessageHeader:
        number = bucket.index * _SEGMENTS + segment.number
        return MessageHeader(self.reducer.state.codec, sender, number, bucket.step, length)

    def _runs(self, bucket: Bucket, begin: int, end: int) -> list[ByteRun]:
        """Return the levels of the values between `begin` and `end`, in order."""
        shares = mixed(self.controller.ratio)
        above, below, cut = max(shares), min(shares), begin
        if above != below:
            cut += round(shares[above] * (end - begin))
        result: list[ByteRun] = []
        offset = bucket.values.storage_offset()
        places = [int(g.storage_offset() - offset) for g in bucket.gradients]
        in_order = sorted(zip(bucket.pieces, places, strict=True), key=lambda item: item[1])
        for piece, start in in_order:
            for first, last, level in ((begin, cut, above), (cut, end, below)):
                a, b = max(first, start), min(last, start + piece.size)
                if a >= b:
                    continue
                part = slice(a - start, b - start)
                residual = self.reducer.state.residual(piece, part, summed=False)
                bits = level if isinstance(piece.codec, Adaptive) else LEVELS[-1]
                without = residual is None and result and result[-1].residual is None
                if without and result[-1].bits == bits:
                    result[-1] = replace(result[-1], end=b)
                else:
                    result.append(ByteRun(a, b, bits, residual))
        return result

    def _encode(self, bucket: Bucket, segment: _Segment, buffer: Tensor) -> Tensor:
        index = 0
        for run in segment.runs:
            codec, values = Truncated(run.bits, self.codec.partition), bucket.values
            end = index + codec.nbytes(run.end - run.begin)
            codec.encode(values[run.begin : run.end], buffer[index:end], Draw(), run.residual)
            index = end
        return buffer[:index]

    def _decode(self, bucket: Bucket, segment: _Segment) -> None:
        """Replace the values of a segment by the sum of all messages, in rank order."""
        begin, values = time.perf_counter(), bucket.values[segment.begin : segment.end]
        for sender in range(self._world):
            try:
                self.codec.decode(segment.messages[sender], values, add=sender > 0)
            except ValueError:
                self.reducer.fault(
                    bucket.about, sender, f"its levels do not fit {values.numel()} values"
                )
        self.reducer.tally.decode += time.perf_counter() - begin

    def _buffer(self, name: str, nbytes: int) -> Tensor:
        return self.reducer.buffer("aqgb", name, nbytes=nbytes)


def _most_bytes(values: int, pieces: int) -> int:
    return Truncated(LEVELS[-1]).nbytes(values) + 16 * (pieces + 1)
