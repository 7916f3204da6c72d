"""AQGB's way of a bucket: every rank sends all of it to all others, in levels that it chooses segment by segment, and all sum what came.

How long a message is its sender alone knows, so a head goes before it, written twice, as nothing else says whether its length is right.
When all heads are here all ranks are, and the time from then on is that of the link, whoever came late.

Invariant: all ranks end with the same bits: each takes of its own values what it has sent, and sums are taken in the order of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qsync_fx.communication.aqgb.adaptive import mixed
from qsync_fx.communication.aqgb.control import Controller
from qsync_fx.communication.bucket import Bucket
from qsync_fx.communication.codecs import PLAIN, Draw
from qsync_fx.communication.codecs.truncation import LEVELS, Adaptive, Truncated
from qsync_fx.communication.geometry import Piece
from qsync_fx.communication.reduction import Reducer
from qsync_fx.communication.wire import messages
from qsync_fx.communication.wire.exchange import exchange
from qsync_fx.communication.wire.messages import HEADER, Head

_SEGMENTS = 2**12
"""More than a bucket has: the head of a message says which bucket's it is, and which segment's."""


@dataclass(frozen=True)
class Run:
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

    def reduce(self, bucket: Bucket) -> None:
        """Puts the mean over ranks in the place of a bucket's values.

        Raises:
            RankError: a rank is gone.
        """
        size, world = bucket.values.numel(), self.reducer.state.world
        step = max(self.codec.segment // 4, -(-size // _SEGMENTS))
        levels: Counter[int] = Counter()
        for number, begin in enumerate(range(0, size, step)):
            levels.update(self._segment(bucket, number, begin, min(begin + step, size)))
        bucket.values.div_(world)
        theory = sum(bits * values for bits, values in levels.items()) / 8
        self.reducer.end(bucket, (world - 1) * PLAIN.nbytes(size), (world - 1) * theory)

    def _segment(self, bucket: Bucket, number: int, begin: int, end: int) -> Counter[int]:
        """Reduces values of a bucket; returns how many of them went in which level."""
        reducer = self.reducer
        values, runs = bucket.values[begin:end], self._runs(bucket, begin, end)
        given = _given(values, runs, begin) if bucket.measured else None
        most = _most(end - begin, len(bucket.pieces))
        message = self._encoded(bucket.values, runs, self._bytes("message", most))
        started = time.perf_counter()
        received, seconds = self._exchanged(bucket, number, message, most)
        reducer.tally.transfer += time.perf_counter() - started
        levels: Counter[int] = Counter()
        for run in runs:
            levels[run.bits] += run.end - run.begin
        # The link was in use for the longer of both ways.
        carried = max(message.numel(), sum(found.numel() for found in received.values()) / len(received))
        self.controller.carried(PLAIN.nbytes(end - begin), carried, seconds, levels)
        if given is not None:
            reducer.tally.measure(given, self.codec, message)
        received[reducer.state.rank] = message
        self._decode(bucket, received, values)
        return levels

    def _exchanged(self, bucket: Bucket, number: int, message: Tensor, most: int) -> tuple[dict[int, Tensor], float]:
        """Returns the messages of all others, and the seconds that the link took."""
        reducer, rank = self.reducer, self.reducer.state.rank
        others = [peer for peer in range(reducer.state.world) if peer != rank]
        what, where = messages.hash_of(reducer.state.codec), bucket.index * _SEGMENTS + number
        head, mine = Head(what, rank, where, bucket.step, message.numel()), self._bytes("head", 2 * HEADER)
        heads = {peer: self._bytes(f"head of {peer}", 2 * HEADER) for peer in others}
        head.write(mine[:HEADER])
        head.write(mine[HEADER:])
        exchange(reducer.group, dict.fromkeys(others, mine), heads, bucket.about)
        received = {}
        for peer, found in heads.items():
            length = messages.length_of(found[HEADER:])
            fault = replace(head, sender=peer, length=length).fault(found[:HEADER])
            if fault is None and length > most:
                fault = f"its length is {length}, and can be {most}"
            if fault is not None:
                reducer.fault(bucket, peer, fault)
            # Of a message whose length is not known as much is taken as comes.
            received[peer] = self._bytes(f"from {peer}", most)[: most if fault is not None else length]
        begin = self.controller.clock()
        exchange(reducer.group, dict.fromkeys(others, message), received, bucket.about)
        seconds = self.controller.clock() - begin
        reducer.tally.wire += (mine.numel() + message.numel()) * len(others)
        return received, seconds

    def _runs(self, bucket: Bucket, begin: int, end: int) -> list[Run]:
        """Returns in which level which values go, in their order."""
        shares = mixed(self.controller.ratio)
        above = max(shares)
        cut = begin + (round(shares[above] * (end - begin)) if len(shares) > 1 else 0)
        found: list[Run] = []
        for piece, start in _placed(bucket):
            for first, last, bits in ((begin, cut, above), (cut, end, min(shares))):
                a, b = max(first, start), min(last, start + piece.size)
                if a >= b:
                    continue
                residual = self.reducer.state.residual(piece, slice(a - start, b - start), summed=False)
                bits = bits if isinstance(piece.codec, Adaptive) else LEVELS[-1]
                if residual is None and found and found[-1].residual is None and found[-1].bits == bits:
                    found[-1] = replace(found[-1], end=b)
                else:
                    found.append(Run(a, b, bits, residual))
        return found

    def _encoded(self, values: Tensor, runs: Sequence[Run], message: Tensor) -> Tensor:
        begin, at = time.perf_counter(), 0
        for run in runs:
            codec = Truncated(run.bits, self.codec.partition)
            nbytes = codec.nbytes(run.end - run.begin)
            codec.encode(values[run.begin : run.end], message[at : at + nbytes], Draw(), run.residual)
            at += nbytes
        self.reducer.tally.encode += time.perf_counter() - begin
        return message[:at]

    def _decode(self, bucket: Bucket, received: Mapping[int, Tensor], values: Tensor) -> None:
        """Sums messages in the order of ranks into these values."""
        begin = time.perf_counter()
        for sender in range(self.reducer.state.world):
            try:
                self.codec.decode(received[sender], values, add=sender > 0)
            except ValueError:
                self.reducer.fault(bucket, sender, f"its levels are not those of {values.numel()} values")
        self.reducer.tally.decode += time.perf_counter() - begin

    def _bytes(self, name: str, nbytes: int) -> Tensor:
        """Returns bytes that stay: new memory costs more than it takes to fill it."""
        found = self._memory.get(name)
        if found is None or found.numel() < nbytes:
            found = self._memory[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return found[:nbytes]


def _placed(bucket: Bucket) -> Iterator[tuple[Piece, int]]:
    """Yields the parameters of a bucket and where they begin in it, in the order in which they lie there."""
    places = [int(g.storage_offset() - bucket.values.storage_offset()) for g in bucket.gradients]
    yield from sorted(zip(bucket.pieces, places, strict=True), key=lambda placed: placed[1])


def _given(values: Tensor, runs: Sequence[Run], begin: int) -> Tensor:
    """Returns what is to be sent: values, and what was left of them before."""
    given = values.clone()
    for run in runs:
        if run.residual is not None:
            given[run.begin - begin : run.end - begin] += run.residual
    return given


def _most(values: int, pieces: int) -> int:
    """Returns more bytes than so many values of so many parameters take, whatever the levels and wherever a rank cuts them."""
    return Truncated(LEVELS[-1]).nbytes(values) + 16 * (pieces + 1)
