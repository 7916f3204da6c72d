"""Statistics and reports of compressed communication, including DUO's two reductions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qsync_fx.communication.codecs.codec import Codec


@dataclass(frozen=True)
class BitLevelSummary:
    """Summary of the decisions of AQGB's controller so far.

    Attributes:
        decisions: their number.
        levels: share of all sent values by number of bits.
        rate: link bandwidth in bytes/s in the last step with transfers; None before.
    """

    decisions: int
    levels: Mapping[int, float]
    rate: float | None

    def __str__(self) -> str:
        levels = sorted(self.levels.items())
        shares = ", ".join(f"{share:.1%} in {bits} bits" for bits, share in levels)
        rate = "link bandwidth not measured yet"
        if self.rate is not None:
            rate = f"link bandwidth {self.rate / 1e6:.1f} MB/s"
        return f"{self.decisions} decisions: {shares or 'no data sent'}; {rate}"


@dataclass
class CommunicationStatistics:
    """Sums over all buckets so far, on this rank.

    Attributes:
        raw: bytes that the same exchanges would send in FP32.
        wire, theory: bytes sent, and bytes according to the papers.
        inside: bytes sent in FP32 within the node by `Hierarchy`; not part of the others.
        encode, decode, transfer, wait: seconds. `transfer` is the rest of the exchanges without
            coding, `wait` the time of buckets in the queue.
        checks: number of comparisons of gradients across ranks, all equal.
        error, power: in measured steps, the squared coding error of this rank's gradients, and the
            squares of the gradients.
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
        return self.encode + self.decode

    def measure(self, value: Tensor, codec: Codec, sent: Tensor) -> None:
        """Add the coding error of FP32 values that were coded as `sent`; skip non-finite values."""
        result = torch.empty_like(value)
        codec.decode(sent, result)
        error = float((result - value).double().square().sum())
        power = float(value.double().square().sum())
        if error + power < float("inf"):
            self.error += error
            self.power += power


_UNCOMPRESSED = "DistributedDataParallel sends all gradients uncompressed"


@dataclass(frozen=True)
class Report:
    """Report of a compressor; `str` formats it.

    Attributes:
        rank, world: rank and world size.
        coded, plain: parameter values that are coded, and values in FP32.
        adapted: AQGB's choices; None for other codecs.
        replicated: whether every rank has all parameters.
    """

    codec: str
    rank: int
    world: int
    coded: int
    plain: int
    tally: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    adapted: BitLevelSummary | None = None
    replicated: bool = True

    @property
    def ratio(self) -> float:
        """Bytes sent relative to FP32; 1 if no bytes were sent."""
        return self.tally.wire / self.tally.raw if self.tally.raw else 1.0

    @property
    def variance(self) -> float | None:
        """Squared coding error relative to the squared gradient; None if not measured."""
        return self.tally.error / self.tally.power if self.tally.power else None

    def line(self, buckets: int) -> str:
        """Return codec, buckets of the last step and mean bytes per step of this rank in a line."""
        who = f"rank {self.rank} of {self.world}"
        start = f"{self.codec} over gloo, {who}: "
        if self.world == 1:
            return f"{start}one rank, no communication"
        if self._is_unused:
            return f"{self.codec}, {who}: {_UNCOMPRESSED}"
        if not self.tally.steps:
            return f"{start}no step yet, {self.coded} values encoded and {self.plain} in FP32"
        return f"{start}{buckets} bucket{'s' * (buckets != 1)}, {self._bytes_of_step()}"

    @property
    def _is_unused(self) -> bool:
        return not self.coded and not self.tally.buckets

    def _bytes_of_step(self) -> str:
        sums = self.tally
        wire, raw = round(sums.wire / sums.steps), round(sums.raw / sums.steps)
        text = f"{wire} bytes per step instead of {raw} in FP32"
        if sums.inside:
            text += f", {round(sums.inside / sums.steps)} within the node in FP32"
        return text

    def __str__(self) -> str:
        sums = self.tally
        lines = [
            f"{self.codec} on rank {self.rank} of {self.world}: {sums.steps} steps, "
            f"{sums.buckets} buckets",
            f"  {self.coded} values encoded, {self.plain} in FP32",
        ]
        if self.world == 1:
            return "\n".join([*lines, "  one rank: no communication, gradients are unchanged"])
        if self._is_unused:
            return "\n".join([*lines, f"  {_UNCOMPRESSED}"])
        lines += [
            f"  sent {sums.wire / 1e6:.3f} MB instead of {sums.raw / 1e6:.3f} MB: "
            f"ratio {self.ratio:.4f}",
            f"  seconds: encode {sums.encode:.3f}, transfer {sums.transfer:.3f}, "
            f"decode {sums.decode:.3f}, in the queue {sums.wait:.3f}",
        ]
        if sums.inside:
            lines.append(
                f"  sent {sums.inside / 1e6:.3f} MB in FP32 within the node; the lines above "
                "are for traffic between nodes"
            )
        if self.replicated and sums.checks:
            lines.append(f"  replicas compared {_times(sums.checks)}, bit-identical")
        elif self.replicated:
            lines.append("  replicas not compared yet")
        if self.adapted is not None:
            lines.append(f"  {self.adapted}")
        if self.variance is not None:
            share = f"{self.variance:.3g} of the squared norm of a rank's gradient"
            lines.append(f"  added variance: {share}")
        return "\n".join(lines)


def _times(count: int) -> str:
    return f"{count} time{'s' * (count != 1)}"


@dataclass
class LookaheadStatistics:
    """Counts of DUO's steps so far, on this rank.

    Attributes:
        committed: steps committed with full-precision gradients.
        skipped: steps without an update, because of non-finite values or dropped gradients.
        waited: seconds that a step or flush waited for the slow reduction of the step before.
    """

    committed: int = 0
    skipped: int = 0
    waited: float = 0.0


@dataclass(frozen=True)
class DuoReport(Report):
    """Report on DUO's fast and slow reduction.

    Attributes:
        slow: statistics of the slow reduction.
        outstanding: whether gradients are pending that were not yet applied in full precision.
        parameters: statistics of parameter exchange; None if the optimizer is not sharded.
        held: bytes of the optimizer's state and of the parameter copies.
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
            f"  full precision, during the next step: sent {slow.wire / 1e6:.3f} MB instead of "
            f"{slow.raw / 1e6:.3f} MB, transfer {slow.transfer:.3f} s, wait {ahead.waited:.3f} s",
            f"  {ahead.committed} steps committed, {int(self.outstanding)} outstanding, "
            f"{ahead.skipped} skipped",
        ]
        if (sent := self.parameters) is not None:
            lines.append(
                f"  parameters: sent {sent.wire / 1e6:.3f} MB instead of {sent.raw / 1e6:.3f} MB, "
                f"transfer {sent.transfer:.3f} s, compared {_times(sent.checks)}, bit-identical; "
                f"memory of this rank's optimizer {self.held / 1e6:.3f} MB"
            )
        return "\n".join(lines)
