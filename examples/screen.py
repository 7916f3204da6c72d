"""What the user sees: one progress bar, and a table at the end.

Invariant: nothing is shown that was not measured or compared, and every number says what it is.
"""

from __future__ import annotations

from pathlib import Path

from messages import WARM_UP, WORLD, Epoch, Job, Phase, Result, Step
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qsync_fx.plan import Plan

ROLES = ("a training GPU", "an inference GPU")
_BUG = "This is a bug; please report it."
_ORDER = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")


class Bar:
    """The progress bar of a run."""

    def __init__(self, console: Console, epochs: int, steps: int, tests: int) -> None:
        self.epochs, self.steps, self.tests = epochs, steps, tests
        self._phases: dict[int, str] = {}
        self._losses: dict[int, tuple[int, float]] = {}
        self._done: dict[int, Epoch] = {}
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
        self.task = self.progress.add_task("starting two processes", total=epochs * steps)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, rank: int, message: Phase | Step | Epoch) -> None:
        """Shows what a rank tells."""
        if isinstance(message, Phase):
            self._phases[rank] = message.text
            text = " · ".join(f"rank {which} {phase}" for which, phase in sorted(self._phases.items()))
            self.progress.update(self.task, description=text)
        elif isinstance(message, Step):
            self._losses[rank] = (message.epoch, message.loss)
            losses = " | ".join(f"{loss:.3f}" for _, (_, loss) in sorted(self._losses.items()))
            if rank == 0:
                done = (message.epoch - 1) * self.steps + message.step
                text = f"epoch {message.epoch}/{self.epochs} · loss {losses}"
                self.progress.update(self.task, completed=done, description=text)
        else:
            self._done[rank] = message
            if len(self._done) == WORLD:
                self._end_of_epoch()

    def _end_of_epoch(self) -> None:
        first, second = self._done[0], self._done[1]
        correct = f"{first.correct / self.tests:7.2%}" if first.correct is not None else ""
        self._done.clear()
        self.progress.console.print(
            f"  epoch {first.epoch:>{len(str(self.epochs))}}/{self.epochs}   training loss {first.loss:.3f} on rank 0, "
            f"{second.loss:.3f} on rank 1   test accuracy {correct}",
            highlight=False,
        )


def summary(results: list[Result], jobs: list[Job], plans: list[Plan], tests: int, seconds: float) -> RenderableType:
    """Returns what the run has come to, a table and what to know about it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for job in jobs:
        table.add_column(f"rank {job.rank}, as {ROLES[job.rank]}", overflow="fold")
    table.add_row("plan", *(_planned(plan) for plan in plans))
    table.add_row("operators", *(_counts(result) for result in results))
    table.add_row("graphs compiled", *(str(result.graphs) for result in results))
    table.add_row("iteration", *(_milliseconds(result.compute) for result in results))
    table.add_row("and all-reduce", *(_milliseconds(result.waiting) for result in results))
    table.add_row("explained in", *(f"explain-rank{job.rank}.txt, .dot" for job in jobs))
    lines = [*_notes(results, seconds), "", *_verdict(results, tests)]
    return Group(table, *(Text.from_markup(line) for line in lines))


def _planned(plan: Plan) -> str:
    default = str(plan.default or "none")
    others = [f"{pattern} {fmt}" for pattern, fmt in plan.patterns] + [
        f"{op} {fmt}" for op, fmt in plan.operators.items()
    ]
    if len(others) > 4:
        others = [*others[:3], f"and {len(others) - 3} more"]
    return "\n".join([f"{default}, but" if others else default, *others])


def _counts(result: Result) -> str:
    names = sorted(result.operators, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return "\n".join(f"{result.operators[name]:>2} in {name}" for name in names)


def _milliseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1000 * seconds:.1f} ms"


def _notes(results: list[Result], seconds: float) -> list[str]:
    lines = ["[dim]Operators: those that a plan decides on, in the precision they were compiled in."]
    if results[0].timed:
        lines.append(
            f"[dim]Iteration: median of {results[0].timed} steps (all but the first {WARM_UP}) of a rank's own work: reading the batch, "
            "forward, backward, optimizer."
        )
        lines.append("[dim]And all-reduce: median wait for the averaged gradients, for the slower rank most of all.")
    else:
        lines.append(f"[dim]Iteration: times are taken after the first {WARM_UP} steps, and there were no more.")
    lines.append(
        f"[dim]Both ranks ran on this CPU, on one thread each: no GPU would take these times. {seconds:.0f} s in all."
    )
    return lines


def _verdict(results: list[Result], tests: int) -> list[str]:
    correct = results[0].correct or 0
    lines = [f"[bold]Test accuracy {correct / tests:.2%}[/], {correct} of {tests} images, by the FP32 weights."]
    first, second = results
    if first.digest == second.digest:
        lines.append(
            f"[bold green]Weights of both ranks are equal to the last bit[/]: {first.parameters} parameters and the statistics, "
            f"SHA-256 {first.digest[:16]}."
        )
    else:
        lines.append(
            f"[bold red]Weights of the ranks differ[/]: SHA-256 {first.digest[:16]} and {second.digest[:16]}. {_BUG}"
        )
    for rank, result in enumerate(results):
        if result.unexplained:
            named = escape(", ".join(result.unexplained[:5]))
            lines.append(f"[bold red]On rank {rank} other precisions were compiled than explained[/]: {named}. {_BUG}")
    return lines


def failure(rank: int, text: str, expected: bool, plan: Path, log: Path) -> RenderableType:
    """Returns what there is to say about a rank that could not go on."""
    lines = [Text.from_markup(f"[bold red]demo: rank {rank} failed[/]"), Text(text), Text(f"  plan:  {plan}")]
    if not expected:
        lines.append(Text(f"  log:   {log}"))
        lines += [Text(f"  | {line}", style="dim") for line in _tail(log)]
    return Group(*lines)


def _tail(log: Path, lines: int = 12) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []
