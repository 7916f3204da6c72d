"""What a training with DUO has sent on both ways, and for how long it waited for the slow one."""

from __future__ import annotations

from dataclasses import dataclass, field

from qsync_fx.communication.tally import Report, Tally


@dataclass
class Ahead:
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

    slow: Tally = field(default_factory=Tally)
    ahead: Ahead = field(default_factory=Ahead)
    outstanding: bool = False
    parameters: Tally | None = None
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
