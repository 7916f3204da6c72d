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
        self.task = self.progress.add_task("two processes start", total=epochs * steps)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, rank: int, message: Phase | Step | Epoch) -> None:
        """Shows what a rank tells."""
        if isinstance(message, Phase):
            self._phases[rank] = message.text
            self.progress.update(self.task, description=self._phase())
        elif isinstance(message, Step):
            if rank == 0:
                done = (message.epoch - 1) * self.steps + message.step
                now = f"loss {message.loss:.3f}" if message.step < self.steps else "evaluating"
                text = f"epoch {message.epoch}/{self.epochs}, {now}"
                self.progress.update(self.task, completed=done, description=text)
        else:
            self._ended[rank] = message
            if len(self._ended) == WORLD:
                self._end_of_epoch()

    def _phase(self) -> str:
        same = len(self._phases) == WORLD and len(set(self._phases.values())) == 1
        if same:
            return f"both ranks: {self._phases[0]}"
        return ", ".join(f"rank {rank}: {text}" for rank, text in sorted(self._phases.items()))

    def _end_of_epoch(self) -> None:
        epoch, correct = self._ended[0].epoch, self._ended[0].correct or 0
        losses = _losses({rank: ended.loss for rank, ended in self._ended.items()})
        self._ended.clear()
        self.progress.console.print(
            f"  epoch {epoch:>{len(str(self.epochs))}}/{self.epochs}   loss {losses}   test accuracy {correct / self.tests:.2%}"
        )


def _losses(losses: dict[int, float]) -> str:
    return ", ".join(f"{loss:.3f} on rank {rank}" for rank, loss in sorted(losses.items()))


def summary(results: list[Result], jobs: list[Job], plans: list[Plan], tests: int, seconds: float) -> RenderableType:
    """Returns what the run has come to: a table, what its rows mean, and the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for job in jobs:
        table.add_column(f"rank {job.rank}\nplays {ROLES[job.rank]}", overflow="fold")
    table.add_row("plan", *(Text(_planned(plan)) for plan in plans))
    table.add_row("operators", *(_counts(result) for result in results))
    table.add_row("graphs", *(str(result.graphs) for result in results))
    table.add_row("iteration", *(_milliseconds(result.compute) for result in results))
    table.add_row("wait", *(_milliseconds(result.waiting) for result in results))
    table.add_row("explained in", *(f"explain-rank{job.rank}.txt\nexplain-rank{job.rank}.dot" for job in jobs))
    notes = Table.grid(padding=(0, 2))
    for name, text in _notes(results, jobs[0].inner):
        notes.add_row(Text(name, style="dim"), Text(text, style="dim"))
    verdict = [Text.from_markup(line) for line in _verdict(results, tests)]
    return Group(table, notes, Text(), *verdict, Text(f"The run took {seconds:.0f} s."))


def _planned(plan: Plan) -> str:
    chosen = [(pattern, fmt) for pattern, fmt in plan.patterns] + [(str(op), fmt) for op, fmt in plan.operators.items()]
    others = [f"  {which}: {fmt}" for which, fmt in chosen]
    if len(others) > 5:
        others = [*others[:4], f"  and {len(others) - 4} more"]
    return "\n".join([str(plan.default or "by operator") + (", but" if others and plan.default else ""), *others])


def _counts(result: Result) -> str:
    names = sorted(result.operators, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return "\n".join(f"{result.operators[name]:>2} in {name}" for name in names)


def _milliseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1000 * seconds:.1f} ms"


def _notes(results: list[Result], inner: str) -> list[tuple[str, str]]:
    """What the rows mean."""
    notes = [
        ("operators", "those that a plan decides on, by the precision they were compiled in"),
        ("graphs", f"how many were compiled, by {inner} after the passes of qsync_fx"),
    ]
    if results[0].timed:
        notes += [
            (
                "iteration",
                f"median of a rank's own work in {results[0].timed} steps: batch, forward, backward, optimizer",
            ),
            ("wait", "median of the rest of a step: until the other rank's gradients are there, and averaged"),
        ]
    else:
        notes.append(("iteration", f"the first {WARM_UP} steps are not measured, and there were no more"))
    notes.append(("", "Both ranks ran on this CPU, one thread each: the times are this CPU's, not those of GPUs."))
    return notes


def _verdict(results: list[Result], tests: int) -> list[str]:
    first, second = results
    correct = first.correct or 0
    lines = [f"[bold]Test accuracy {correct / tests:.2%}[/]: {correct} of {tests} images, evaluated in FP32."]
    if first.digest == second.digest:
        lines.append(
            f"[bold green]The weights of both ranks are equal to the last bit[/]: {first.parameters} parameters,\n"
            f"and the statistics of the batch norms (SHA-256 {first.digest[:16]}...)"
        )
    else:
        lines.append(
            f"[bold red]The weights of the ranks differ.[/] {_BUG}\n  rank 0: SHA-256 {first.digest}\n  rank 1: SHA-256 {second.digest}"
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
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []
    return [line if len(line) <= 200 else f"{line[:200]}..." for line in last]
