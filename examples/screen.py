"""Terminal output of a running demo: progress bars, one line per epoch, errors.

Invariant: each number is a measurement with its label.
"""

from __future__ import annotations

from pathlib import Path

from messages import RUNS, WORLD, Epoch, Job, Phase, PlanMessage, Step
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

TITLES = {"uniform": "uniform low precision", "planned": "the plan"}


class Bar:
    """Progress bars of a run: one for the measurement, one for the training."""

    def __init__(self, console: Console, job: Job, steps: int, tests: int) -> None:
        self.epochs, self.steps, self.tests = job.epochs, steps, tests
        self._phases: dict[int, str] = {}
        self._ended: dict[int, Epoch] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
        )
        # A noisy machine needs more steps, so their number is not known in advance.
        self._measuring = self.progress.add_task("two processes start", total=None)
        self._training = self.progress.add_task(
            "training", total=len(RUNS) * job.epochs * steps, visible=False
        )
        self._shown = self._measuring
        if job.plan_path is not None:
            self._trains()

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, rank: int, message: Phase | PlanMessage | Step | Epoch) -> None:
        """Show a rank's message."""
        if isinstance(message, Phase):
            self._phases[rank] = message.text
            self.progress.update(self._shown, description=self._phase())
            if message.steps and rank == WORLD - 1:
                self.progress.update(self._measuring, completed=message.steps)
        elif isinstance(message, PlanMessage):
            self._trains()
            self.progress.console.print(Text(message.answer), Text())
        elif isinstance(message, Step):
            if rank == 0 and message.run == RUNS[-1]:
                steps = (message.epoch - 1) * self.steps + message.step
                now = "evaluating"
                if message.step < self.steps:
                    now = f"loss {message.loss:.3f} under {TITLES[message.run]}"
                text = f"epoch {message.epoch}/{self.epochs}, both runs interleaved, {now}"
                self.progress.update(self._training, completed=len(RUNS) * steps, description=text)
        else:
            self._ended[rank] = message
            if len(self._ended) == WORLD:
                self._end_of_epoch()

    def _trains(self) -> None:
        self._shown = self._training
        self.progress.update(self._measuring, visible=False)
        self.progress.reset(self._training, visible=True)

    def _phase(self) -> str:
        same = len(self._phases) == WORLD and len(set(self._phases.values())) == 1
        if same:
            return f"both ranks: {self._phases[0]}"
        return ", ".join(f"rank {rank}: {text}" for rank, text in sorted(self._phases.items()))

    def _end_of_epoch(self) -> None:
        first = self._ended[0]
        losses = ", ".join(
            f"{ended.loss:.3f} on rank {rank}" for rank, ended in sorted(self._ended.items())
        )
        self._ended.clear()
        number = f"{first.epoch:>{len(str(self.epochs))}}/{self.epochs}"
        accuracy = f"test accuracy {(first.correct or 0) / self.tests:.2%}"
        self.progress.console.print(
            f"  epoch {number}   {TITLES[first.run]:<21}   loss {losses}   {accuracy}"
        )


def failure(rank: int, text: str, expected: bool, plan: Path, log: Path) -> RenderableType:
    """Return the report of a rank's failure."""
    lines = [
        Text.from_markup(f"[bold red]demo: rank {rank} failed[/]"),
        Text(text),
        Text(f"  plan:  {plan}"),
    ]
    if not expected:
        lines.append(Text(f"  log:   {log}"))
        lines += [Text(f"  | {line}", style="dim") for line in _tail(log)]
    return Group(*lines)


def _tail(log: Path, lines: int = 12) -> list[str]:
    try:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []
    return [line if len(line) <= 200 else f"{line[:200]}..." for line in last]
