"""A message that a rank sends, and messages that it sums, of the values of a bucket, stretch by stretch.

What lies on another device than the CPU is coded there, and its bytes come to the host, or from it, a stretch at once.

Invariant: sums are taken in the order of the members, whatever comes first; of a message that is not the one awaited nothing is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from qsync_fx.communication.bucket import Bucket
from qsync_fx.communication.codecs import memory
from qsync_fx.communication.state import State
from qsync_fx.communication.tally import Tally
from qsync_fx.communication.wire.messages import Head
from qsync_fx.communication.wire.stretches import Stretch

Fault = Callable[[int, str], None]
"""What is called with the place of a member whose message is wrong, and with what is."""


@dataclass(frozen=True)
class Given:
    """A message of this rank.

    Attributes:
        memory: its bytes, the head written.
        stretches: in which it goes.
        parts: of each parameter of a bucket, which values it holds.
        values: these, FP32.
        residuals: what was left of them; None where a codec leaves nothing.
        summed: whether they are a mean already.
    """

    memory: Tensor
    stretches: Sequence[Stretch]
    parts: Sequence[slice]
    values: Sequence[Tensor]
    residuals: Sequence[Tensor | None]
    summed: bool

    def encode(self, bucket: Bucket, number: int, state: State, tally: Tally) -> None:
        """Writes a stretch."""
        begin = time.perf_counter()
        stretch = self.stretches[number]
        sent = self.memory[stretch.coded]
        like = self.values[0] if self.values else sent
        near = memory.beside(sent, like)
        for run in stretch.runs:
            piece, residual = bucket.pieces[run.place], self.residuals[run.place]
            values, to = self.values[run.place][run.values], near[stretch.within(run)]
            residual = None if residual is None else residual[run.values]
            whole = values if residual is None or not bucket.measured else values + residual
            first = self.parts[run.place].start + run.values.start
            piece.codec.encode(values, to, state.draw(piece, bucket.step, first, self.summed), residual)
            if bucket.measured and not self.summed:
                tally.measure(whole, piece.codec, to)
        if near is not sent:
            sent.copy_(near)
        tally.encode += time.perf_counter() - begin


@dataclass(frozen=True)
class Taken:
    """Messages with the same parts of a bucket, of which the sum or the mean is taken.

    Attributes:
        stretches: in which they come.
        messages: by the place of the member that sends it, in the order in which they are summed; this rank's own among them.
        values: what they are summed to, FP32.
        summed: whether they are a mean already.
        onto: of each parameter, whether they are added to what is there; else none is.
        over: what their sum is divided by.
        unread: of whom the message is none that was awaited.
    """

    stretches: Sequence[Stretch]
    messages: Mapping[int, Tensor]
    values: Sequence[Tensor]
    summed: bool = False
    onto: Sequence[bool] = ()
    over: int = 1
    unread: set[int] = field(default_factory=set)

    def look(self, head: Callable[[int, Tensor, bool], Head], fault: Fault) -> None:
        """Looks whether messages are those awaited, whose heads `head` returns."""
        for sender, message in self.messages.items():
            if (what := head(sender, message, self.summed).fault(message)) is not None:
                fault(sender, what)
                self.unread.add(sender)

    def decode(self, bucket: Bucket, number: int, tally: Tally, fault: Fault) -> None:
        """Sums a stretch."""
        begin = time.perf_counter()
        good = [(sender, message) for sender, message in self.messages.items() if sender not in self.unread]
        stretch = self.stretches[number]
        runs = stretch.runs
        for order, (sender, message) in enumerate(good):
            near = memory.taken_to(message[stretch.coded], self.values[0]) if runs else message
            last = order + 1 == len(good) and self.over == 1
            for run in runs:
                add = order > 0 or (bool(self.onto) and self.onto[run.place])
                try:
                    codec, values = bucket.pieces[run.place].codec, self.values[run.place][run.values]
                    codec.decode(near[stretch.within(run)], values, add, last)
                except ValueError as error:
                    fault(sender, str(error))
        if self.over > 1:
            for run in runs:
                self.values[run.place][run.values].div_(self.over)
        if runs:
            memory.finished(self.values[0])
        tally.decode += time.perf_counter() - begin
