"""What a compressed training has sent, and how long that took: counted as it runs, and told.

What a training with DUO has sent on both ways, and for how long it waited for the slow one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qsync_fx.communication.aqgb.controller import Adapted
from qsync_fx.communication.codecs.codec import Codec


@dataclass
class CommunicationStatistics:
    """Sums over all buckets so far, of this rank.

    Attributes:
        buckets, steps: how many.
        raw: bytes that the same exchanges would send in FP32.
        wire, theory: bytes sent, and what the papers give for them.
        inside: bytes sent in FP32 to ranks of the same node, where only what goes between nodes is coded; no part of the others.
        encode, decode, transfer, wait: seconds; `transfer` is what an exchange took besides coding, and `wait` how long buckets stood in
            the queue.
        checks: how often the ranks' gradients were compared, and found equal.
        error, power: of what was measured in those steps: the squares of what the codec changed of this rank's gradients, and of these.
    """

    buckets: int = 0
    steps: int = 0
    raw: int = 0
    wire: int = 0
    theory: float = 0.0
    inside: int = 0
    encode: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0
    wait: float = 0.0
    checks: int = 0
    error: float = 0.0
    power: float = 0.0

    @property
    def coding(self) -> float:
        """Seconds of encoding and decoding."""
        return self.encode + self.decode

    def measure(self, value: Tensor, codec: Codec, sent: Tensor) -> None:
        """Adds what a codec has changed of values that it made these bytes of; of those that are not finite nothing."""
        result = torch.empty_like(value)
        codec.decode(sent, result)
        error = float((result - value).double().square().sum())
        power = float(value.double().square().sum())
        if error + power < float("inf"):
            self.error += error
            self.power += power


@dataclass(frozen=True)
class Report:
    """What `DdpCompressor.report` returns; `str` of it is for people.

    Attributes:
        codec: its name.
        rank, world: this rank's number, of how many.
        coded, plain: parameters, in values, that go through the codec, and in FP32.
        tally: the sums.
        adapted: what AQGB chose; None for other codecs.
        replicated: whether all ranks hold all parameters.
    """

    codec: str
    rank: int
    world: int
    coded: int
    plain: int
    tally: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    adapted: Adapted | None = None
    replicated: bool = True

    @property
    def ratio(self) -> float:
        """Bytes on the wire for each that FP32 would take; 1 where nothing was sent."""
        return self.tally.wire / self.tally.raw if self.tally.raw else 1.0

    @property
    def variance(self) -> float | None:
        """The variance that the codec adds to a rank's gradient, for each square of it; None before it was measured."""
        return self.tally.error / self.tally.power if self.tally.power else None

    def line(self, buckets: int) -> str:
        """Return codec, transport, buckets of the last step and mean bytes that this rank sends in a step, in one line."""
        start = f"{self.codec} over gloo, rank {self.rank} of {self.world}: "
        if self.world == 1:
            return f"{start}one rank, nothing is sent"
        if not self.coded and not self.tally.buckets:
            return f"{self.codec}, rank {self.rank} of {self.world}: DistributedDataParallel sends all gradients uncompressed"
        if not self.tally.steps:
            return f"{start}no step yet, {self.coded} values coded and {self.plain} in FP32"
        return f"{start}{buckets} bucket{'s' * (buckets != 1)}, {self._bytes_of_step()}"

    def _bytes_of_step(self) -> str:
        sums = self.tally
        wire, raw = round(sums.wire / sums.steps), round(sums.raw / sums.steps)
        inside = (
            f", {round(sums.inside / sums.steps)} inside the node in FP32" if sums.inside else ""
        )
        return f"{wire} bytes per step in place of {raw} in FP32{inside}"

    def __str__(self) -> str:
        sums = self.tally
        lines = [
            f"{self.codec} on rank {self.rank} of {self.world}: {sums.steps} steps, {sums.buckets} buckets",
            f"  {self.coded} values coded, {self.plain} in FP32",
        ]
        if self.world == 1:
            return "\n".join(
                [*lines, "  one rank: nothing is sent, and gradients stay as they are"]
            )
        if not self.coded and not sums.buckets:
            return "\n".join(
                [
                    *lines,
                    "  nothing is compressed: DistributedDataParallel sends gradients as they are",
                ]
            )
        lines += [
            f"  sent {sums.wire / 1e6:.3f} MB in place of {sums.raw / 1e6:.3f} MB: {self.ratio:.4f}",
            f"  seconds: encode {sums.encode:.3f}, transfer {sums.transfer:.3f}, decode {sums.decode:.3f}, in the queue {sums.wait:.3f}",
        ]
        if sums.inside:
            lines.append(
                f"  inside the node sent {sums.inside / 1e6:.3f} MB in FP32; the lines above are of what goes between nodes"
            )
        if self.replicated:
            lines.append(
                f"  replicas compared {sums.checks} time{'s' * (sums.checks != 1)}, equal to the last bit"
                if sums.checks
                else "  replicas not compared yet"
            )
        if self.adapted is not None:
            lines.append(f"  {self.adapted}")
        if self.variance is not None:
            lines.append(
                f"  variance added: {self.variance:.3g} of the square of a rank's gradient"
            )
        return "\n".join(lines)


def report(
    codec: str,
    rank: int,
    world: int,
    coded: int,
    plain: int,
    tally: CommunicationStatistics,
    adapted: Adapted | None = None,
) -> Report:
    """Returns the report so far."""
    return Report(codec, rank, world, coded, plain, replace(tally), adapted)


@dataclass
class LookaheadStatistics:
    """Sums so far, of this rank.

    Attributes:
        committed: steps whose gradients were used in full.
        skipped: steps that were left out: a GradScaler found an infinity, or the user dropped the gradients.
        waited: seconds that gradients of a step, or a flush, stood behind the slow reduction of those before.
    """

    committed: int = 0
    skipped: int = 0
    waited: float = 0.0


@dataclass(frozen=True)
class DuoReport(Report):
    """A report on the fast reduction, and on the slow one.

    Attributes:
        slow: the sums of the slow reduction.
        ahead: what became of steps.
        outstanding: whether there are gradients that were not used in full yet.
        parameters: the sums of what was sent of parameters; None where all ranks step all of them.
        held: bytes of the optimizer's state and of what is kept of parameters beside those of the model.
    """

    slow: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    ahead: LookaheadStatistics = field(default_factory=LookaheadStatistics)
    outstanding: bool = False
    parameters: CommunicationStatistics | None = None
    held: int = 0

    def _bytes_of_step(self) -> str:
        slow = round(self.slow.wire / max(1, self.slow.steps))
        text = f"{super()._bytes_of_step()}, {slow} in full precision during the next step"
        if self.parameters is not None:
            text += f", {round(self.parameters.wire / self.tally.steps)} of parameters"
        return text

    def __str__(self) -> str:
        if self.world == 1:
            return super().__str__()
        slow, ahead = self.slow, self.ahead
        lines = [
            super().__str__(),
            f"  in full behind the next step: sent {slow.wire / 1e6:.3f} MB in place of {slow.raw / 1e6:.3f} MB,"
            f" transfer {slow.transfer:.3f} s, waited for {ahead.waited:.3f} s",
            f"  {ahead.committed} steps committed, {int(self.outstanding)} outstanding, {ahead.skipped} left out",
        ]
        if (sent := self.parameters) is not None:
            lines.append(
                f"  parameters sent {sent.wire / 1e6:.3f} MB in place of {sent.raw / 1e6:.3f} MB, transfer {sent.transfer:.3f} s,"
                f" compared {sent.checks} time{'s' * (sent.checks != 1)}, equal to the last bit;"
                f" this rank's optimizer holds {self.held / 1e6:.3f} MB"
            )
        return "\n".join(lines)
