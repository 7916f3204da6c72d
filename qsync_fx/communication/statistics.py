"""Statistics and reports of compressed communication, including DUO's two reductions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qsync_fx.communication.codecs.codec import Codec


@dataclass(frozen=True)
class BitLevelSummary:
    """Number of decisions of AQGB's controller so far, and their results."""

    decisions: int
    levels: Mapping[int, float]  # share of all sent values by number of bits
    rate: float | None  # bytes/s of the link in the last step with transfers

    def __str__(self) -> str:
        levels = sorted(self.levels.items())
        shares = ", ".join(f"{share:.1%} in {bits} bits" for bits, share in levels)
        rate = "not measured yet" if self.rate is None else f"{self.rate / 1e6:.1f} MB/s"
        return f"{self.decisions} decisions: {shares or 'no data sent'}; link bandwidth {rate}"


@dataclass
class CommunicationStatistics:
    """Sums of bytes and seconds over all buckets so far, on this rank."""

    buckets: int = 0
    steps: int = 0
    raw: int = 0  # bytes of the same exchanges in FP32
    wire: int = 0
    theory: float = 0.0  # bytes according to the papers
    inside: int = 0  # bytes within the node, not part of the others
    encode: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0  # without coding
    wait: float = 0.0  # of buckets in the queue
    checks: int = 0  # equal comparisons of gradients across ranks
    error: float = 0.0  # squared coding error of this rank's measured gradients
    power: float = 0.0  # squares of these gradients

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


@dataclass(frozen=True)
class Report:
    """Report of a compressor; `str` formats it."""

    codec: str
    rank: int
    world: int
    coded: int  # parameter values that are coded
    plain: int  # parameter values in FP32
    tally: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    adapted: BitLevelSummary | None = None  # AQGB's choices; None for other codecs
    replicated: bool = True  # whether every rank has all parameters
    transport: str = ""  # description of the transport of coded gradients
    inside: str = "fp32"  # codecs inside nodes

    @property
    def ratio(self) -> float:
        """Bytes sent relative to FP32; 1 if no bytes were sent."""
        return self.tally.wire / self.tally.raw if self.tally.raw else 1.0

    @property
    def variance(self) -> float | None:
        """Squared coding error relative to the squared gradient; None if not measured."""
        return self.tally.error / self.tally.power if self.tally.power else None

    def __str__(self) -> str:
        sums = self.tally
        start = (
            f"{self.codec} on rank {self.rank} of {self.world}: {sums.steps} steps, "
            f"{sums.buckets} buckets\n  {self.coded} values encoded, {self.plain} in FP32\n"
        )
        if self.world == 1:
            return f"{start}  one rank: no communication, gradients are unchanged"
        if not self.coded and not sums.buckets:
            return f"{start}  DistributedDataParallel sends all gradients uncompressed"
        seconds = f"seconds, {self.transport}" if self.transport else "seconds"
        lines = [
            f"{_sent(sums)}: ratio {self.ratio:.4f}",
            f"{seconds}: encode {sums.encode:.3f}, transfer {sums.transfer:.3f}, "
            f"decode {sums.decode:.3f}, in the queue {sums.wait:.3f}",
        ]
        if sums.inside:
            codecs = self.inside.replace("fp32", "FP32")
            inside = f"sent {sums.inside / 1e6:.3f} MB in {codecs} within the node"
            lines.append(f"{inside}; the lines above are for traffic between nodes")
        if self.replicated and sums.checks:
            lines.append(f"replicas {_compared(sums)}")
        elif self.replicated:
            lines.append("replicas not compared yet")
        if self.adapted is not None:
            lines.append(str(self.adapted))
        if self.variance is not None:
            norm = "the squared norm of a rank's gradient"
            lines.append(f"added variance: {self.variance:.3g} of {norm}")
        return start + "\n".join(f"  {line}" for line in lines)


def _sent(sums: CommunicationStatistics) -> str:
    return f"sent {sums.wire / 1e6:.3f} MB instead of {sums.raw / 1e6:.3f} MB"


def _compared(sums: CommunicationStatistics) -> str:
    return f"compared {sums.checks} time{'s' * (sums.checks != 1)}, bit-identical"


@dataclass
class LookaheadStatistics:
    """Counts of DUO's steps so far, and seconds that steps waited for the slow reduction."""

    committed: int = 0
    skipped: int = 0
    waited: float = 0.0


@dataclass(frozen=True)
class DuoReport(Report):
    """Report on DUO's fast and slow reduction."""

    slow: CommunicationStatistics = field(default_factory=CommunicationStatistics)
    ahead: LookaheadStatistics = field(default_factory=LookaheadStatistics)
    outstanding: bool = False  # whether gradients await their full precision
    parameters: CommunicationStatistics | None = None  # of parameter exchange; None if not sharded
    state_bytes: int = 0  # bytes of the optimizer's state and the parameter copies
    bridge: int | None = None  # bytes on the device; None if no copies are in host memory

    def __str__(self) -> str:
        if self.world == 1:
            return super().__str__()
        slow, ahead, text = self.slow, self.ahead, super().__str__()
        text += (
            f"\n  full precision, during the next step: {_sent(slow)}, "
            f"transfer {slow.transfer:.3f} s, wait {ahead.waited:.3f} s\n  {ahead.committed} steps "
            f"committed, {int(self.outstanding)} outstanding, {ahead.skipped} skipped"
        )
        if self.bridge is not None:
            text += f"\n  copies in host memory, by a bridge of {self.bridge / 1e6:.3f} MB"
        if (sent := self.parameters) is not None:
            text += (
                f"\n  parameters: {_sent(sent)}, transfer {sent.transfer:.3f} s, {_compared(sent)}"
                f"; memory of this rank's optimizer {self.state_bytes / 1e6:.3f} MB"
            )
        return text
