"""Report of a demo run: table of predictions and measurements, goals, and verdict.

Invariant: each number is sent by a rank or computed from such numbers; a missing measurement is
reported as "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Any

from messages import RUNS, WARM_UP, WORLD, Job, PlanMessage, Ran, Result
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from screen import TITLES

_BUG = "This is a bug; please report it."
_ORDER = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
SLOWER, LESS, OFF = 0.02, 0.3, 0.05
"""Goals for the plan, relative to uniform low precision.

Maximum increase in step time, minimum reduction of variance, and maximum relative error of the
predicted step time.
"""

DISTURBED = 0.05
"""Fraction of CPU time lost to other processes from which a warning is printed."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        job: of rank 0.
        planned: plan with its predictions; None if the user provided the plan.
        results: of each rank.
        tests: number of test images.
    """

    job: Job
    planned: PlanMessage | None
    results: Sequence[Result]
    tests: int

    def ran(self, run: str) -> list[Ran]:
        """Return the result of a training on each rank."""
        return [result.runs[run] for result in self.results]

    def seconds(self, run: str) -> float | None:
        """Return the seconds of a step, averaged over the ranks.

        A rank that waits at the end of a step does not wait in the next one.
        """
        values = [ran.took["seconds"] for ran in self.ran(run) if ran.took is not None]
        return fmean(values) if values else None

    @property
    def disturbed(self) -> float:
        """Maximum fraction of computing time lost to other processes, over ranks and runs."""
        took = [ran.took for run in RUNS for ran in self.ran(run) if ran.took is not None]
        return max((1 - step["processor"] / step["computing"] for step in took), default=0.0)

    @property
    def noise(self) -> float:
        """Relative uncertainty of a run's seconds: two standard deviations between its parts, and
        the time that other processes took from the run.
        """
        took = [ran.took for run in RUNS for ran in self.ran(run) if ran.took is not None]
        parts = max((2 * step["noise"] / step["seconds"] for step in took), default=0.0)
        return parts + max(0.0, self.disturbed)

    @property
    def right(self) -> bool:
        """Whether replicas are bit-equal and compiled precisions equal the explained ones."""
        runs = [self.ran(run) for run in RUNS]
        return all(
            result.digest == ran[0].digest and not result.unexplained
            for ran in runs
            for result in ran
        )

    @property
    def knobs(self) -> dict[str, dict[str, Any] | None]:
        """Predicted images per second, variance, memory and batches of each plan of `KNOBS`."""
        if self.planned is None:
            return {}
        return {
            name: None
            if prediction is None
            else {
                "images per second": sum(prediction[1]) / prediction[0].seconds,
                "variance": prediction[0].variance,
                "peak": prediction[0].peak[-1],
                "batches": prediction[1],
            }
            for name, prediction in self.planned.knobs.items()
        }

    def to_json(self) -> dict[str, object]:
        """Return predictions and measurements as plain values."""
        memory, predicted = None, {}
        if self.planned is not None:
            memory = self.planned.memory
            predicted = {run: vars(values) for run, values in self.planned.predicted.items()}
        return {
            "batches": self.job.batches,
            "memory": memory,
            "predicted": predicted,
            "knobs": self.knobs,
            "measured": {
                run: {
                    "seconds": self.seconds(run),
                    "ranks": [ran.took for ran in self.ran(run)],
                    "peak": [ran.peak for ran in self.ran(run)],
                    "operators": [ran.operators for ran in self.ran(run)],
                    "batches": [ran.batch for ran in self.ran(run)],
                    "accuracy": (self.ran(run)[0].correct or 0) / self.tests,
                    "steps": self.ran(run)[0].timed,
                }
                for run in RUNS
            },
        }


def summary(outcome: Outcome, seconds: float) -> RenderableType:
    """Return the final report."""
    verdict = [Text.from_markup(line) for line in (*_wanted(outcome), "", *_verdict(outcome))]
    took = Text(f"The run took {seconds:.0f} s.")
    compared = []
    if outcome.planned is not None and outcome.knobs:
        compared = [_compared(outcome, outcome.planned.memory)]
    measured = (_table(outcome), _notes(outcome), Text(), *_picture(outcome))
    return Group(*measured, *compared, *verdict, took)


def _compared(outcome: Outcome, memory: float) -> RenderableType:
    """Return the table of the predicted effect of formats and batches, alone and together."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("predicted", no_wrap=True)
    for name in ("images a step", "images/s", "variance", "memory of rank 1"):
        table.add_column(name, justify="right")
    for name, values in outcome.knobs.items():
        cells = ["", "", "", "more than allowed"]
        if values is not None:
            batches = " + ".join(map(str, values["batches"]))
            used = _megabytes(values["peak"])
            if values["peak"] > memory:
                used += ", too much"
            cells = [
                batches,
                f"{values['images per second']:.0f}",
                f"{values['variance']:.2g}",
                used,
            ]
        table.add_row(name, *cells)
    text = "What the formats and the batches contribute, alone and together:"
    return Group(Text(text), table)


def _picture(outcome: Outcome) -> Iterator[Text]:
    """Yield a bar of each rank's step: own work and waiting."""
    rows = [
        (f"rank {rank} {run}", ran.took)
        for rank in range(WORLD)
        for run, ran in ((run, outcome.ran(run)[rank]) for run in RUNS)
        if ran.took is not None
    ]
    if not rows:
        return
    scale = _WIDTH / max(took["computing"] + took["waiting"] for _, took in rows)
    for name, took in rows:
        work, waiting = (round(scale * took[part]) for part in ("computing", "waiting"))
        bar = Text("█" * work, style="blue") + Text("░" * waiting, style="yellow")
        yield Text(f"  {name:<16} ") + bar + Text(f" {_milliseconds(took['seconds'])}")
    yield Text("  █ own work   ░ waiting for the other rank", style="dim")
    yield Text()


_WIDTH = 44
"""Characters of the longest bar."""


def _table(outcome: Outcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for rank in range(WORLD):
        for run in RUNS:
            table.add_column(f"rank {rank}\n{run}", overflow="fold", justify="right")

    def row(name: str, of: Callable[[str, int], str]) -> None:
        table.add_row(name, *(of(run, rank) for rank in range(WORLD) for run in RUNS))

    def measured(name: str, label: str) -> None:
        took = {run: [ran.took or {} for ran in outcome.ran(run)] for run in RUNS}
        row(f"{name}, measured", lambda run, rank: _milliseconds(took[run][rank].get(label)))

    def predicted(name: str, label: str, text: Callable[[float], str]) -> None:
        if outcome.planned is not None:
            predictions = outcome.planned.predicted
            row(
                f"{name}, predicted", lambda run, rank: text(getattr(predictions[run], label)[rank])
            )

    row("images a step", lambda run, rank: str(outcome.ran(run)[rank].batch))
    row("operators", lambda run, rank: _counts(outcome.ran(run)[rank]))
    row("graphs", lambda run, rank: str(outcome.ran(run)[rank].graphs))
    if outcome.planned is not None:
        steps = outcome.planned.predicted
        row("iteration, predicted", lambda run, _: _milliseconds(steps[run].seconds))
    measured("iteration", "seconds")
    predicted("own work", "computing", _milliseconds)
    measured("own work", "computing")
    predicted("waiting", "waiting", _milliseconds)
    measured("waiting", "waiting")
    predicted("memory", "peak", _megabytes)
    row("memory, measured", lambda run, rank: _megabytes(outcome.ran(run)[rank].peak))
    if outcome.planned is not None:
        caps = ["any"] * (WORLD - 1) + [_megabytes(outcome.planned.memory)]
        row("memory, allowed", lambda _, rank: caps[rank])
    accuracies = {run: [f"{_accuracy(outcome, run):.2%}"] + [""] * (WORLD - 1) for run in RUNS}
    row("test accuracy", lambda run, rank: accuracies[run][rank])
    return table


def _notes(outcome: Outcome) -> RenderableType:
    """Return the explanations of the table's rows."""
    timed = outcome.ran(RUNS[0])[0].timed
    notes = [
        ("operators", "the adjustable operators, by the precision they were compiled in"),
        (
            "graphs",
            f"number of graphs that {outcome.job.inner_backend} compiled after the passes",
        ),
        ("iteration", f"median of {timed} steps: batch, forward, backward, all-reduce, optimizer"),
        ("waiting", "part of the iteration until gradients are averaged; own work is the rest"),
        ("memory", "peak bytes: weights, buckets, optimizer state and allocations of a step"),
    ]
    if not timed:
        notes[2:4] = [
            ("iteration", f"not measured: the run had at most {WARM_UP} steps, which are warm-up")
        ]
    grid = Table.grid(padding=(0, 2))
    for name, text in notes:
        grid.add_row(Text(name, style="dim"), Text(text, style="dim"))
    return grid


def _wanted(outcome: Outcome) -> Iterator[str]:
    """Yield lines that compare the run with the goals of hybrid training."""
    uniform, planned = outcome.seconds("uniform"), outcome.seconds("planned")
    if uniform is None or planned is None:
        return
    noise, more = outcome.noise, planned / uniform - 1
    yield _verdict_line(
        more - SLOWER,
        f"a step is {abs(more):.1%} {_change(more)} than with uniform low precision",
        f"{SLOWER:.0%} allowed",
        noise,
    )
    (before, other), (after, then) = (
        [ran.took["waiting"] for ran in outcome.ran(run) if ran.took is not None] for run in RUNS
    )
    waits = f"rank 0 waits {_milliseconds(after)} a step instead of {_milliseconds(before)}"
    yield _verdict_line((after - before) / uniform - SLOWER, waits, noise=noise)
    yield f"  rank 1 waits {_milliseconds(then)} instead of {_milliseconds(other)}"
    if outcome.planned is None:
        return
    predictions, memory = outcome.planned.predicted, outcome.planned.memory
    if predictions["uniform"].variance:
        less = 1 - predictions["planned"].variance / predictions["uniform"].variance
        yield _verdict_line(
            LESS - less,
            f"rounding adds {less:.0%} less variance to the mean gradient (sum of Omega)",
            f"{LESS:.0%} required",
        )
    counts = [ran[-1].operators for ran in (outcome.ran("uniform"), outcome.ran("planned"))]
    recovered = counts[1].get("fp32", 0) - counts[0].get("fp32", 0)
    total = sum(counts[1].values())
    yield f"  {recovered} of {total} operators of rank 1 are restored to FP32"
    off = predictions["planned"].seconds / planned - 1
    yield _verdict_line(
        abs(off) - OFF,
        f"the predicted step is {abs(off):.1%} {_change(off)} than the measured one",
        f"{OFF:.0%} allowed",
        noise,
    )
    peak = outcome.ran("planned")[-1].peak
    if peak is not None:
        yield _verdict_line(
            peak - memory,
            f"rank 1 used {_megabytes(peak)} at its peak, of {_megabytes(memory)} allowed",
        )
    yield f"  Step times of this run vary by {noise:.1%}; a goal missed by less is undecided."
    if outcome.disturbed > DISTURBED:
        yield (
            f"  [yellow]Other processes used the cores for {outcome.disturbed:.0%} of a rank's "
            "own work, which the measured times include.[/]"
        )


def _verdict_line(excess: float, text: str, goal: str = "", noise: float = 0.0) -> str:
    """Return a line about a goal: met if `excess` is at most 0, and undecided within noise."""
    result = "[yellow]missed[/]"
    if excess <= 0:
        result = "[green]met[/]"
    elif excess <= noise:
        result = "undecided"
    return f"  {text}{goal and ', '}{goal}: {result}"


def _change(change: float) -> str:
    return "longer" if change > 0 else "shorter"


def _counts(ran: Ran) -> str:
    names = dict.fromkeys((*_ORDER, *ran.operators))
    return "\n".join(
        f"{ran.operators[name]:>2} in {name}" for name in names if name in ran.operators
    )


def _milliseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1000 * seconds:.1f} ms"


def _megabytes(size: float | None) -> str:
    return "not measured" if size is None else f"{size / 1e6:.2f} MB"


def _accuracy(outcome: Outcome, run: str) -> float:
    return (outcome.ran(run)[0].correct or 0) / outcome.tests


def _verdict(outcome: Outcome) -> Iterator[str]:
    planned, uniform = (_accuracy(outcome, run) for run in ("planned", "uniform"))
    chance = 2 * sqrt(2 * planned * (1 - planned) / outcome.tests)
    yield (
        f"[bold]Test accuracy {planned:.2%}[/] under the plan, "
        f"{uniform:.2%} with uniform low precision, evaluated in FP32."
    )
    yield (
        f"With {outcome.tests} test images, a difference below {chance:.2%} is not significant. "
        "In a training this short, another seed changes the accuracy by more."
    )
    for run in RUNS:
        first, second = outcome.ran(run)
        if first.digest == second.digest:
            yield (
                f"[bold green]The weights of both ranks are equal to the last bit[/] "
                f"({TITLES[run]}): {outcome.results[0].parameters} parameters and batch norms' "
                f"statistics, SHA-256 {first.digest[:16]}"
            )
        else:
            yield f"[bold red]The weights of the ranks differ[/] ({TITLES[run]}). {_BUG}"
            yield f"  rank 0: SHA-256 {first.digest}\n  rank 1: SHA-256 {second.digest}"
        yield from _unexplained(outcome.ran(run))


def _unexplained(ran: Sequence[Ran]) -> Iterator[str]:
    for rank, result in enumerate(ran):
        if result.unexplained:
            named = escape(", ".join(result.unexplained[:5]))
            yield (
                "[bold red]Compiled precisions differ from the explained ones[/] "
                f"on rank {rank}: {named}. {_BUG}"
            )
