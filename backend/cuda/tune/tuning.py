"""Which candidate is fastest for a problem.

torch (cuBLAS, cuDNN) is always the first candidate, so tuning can only gain. Timings are noisy and a choice must not be: candidates are
measured in rounds that take turns, a candidate's time is the median of all its rounds, and the earliest candidate whose median is within
`MARGIN` of the fastest one's wins. So a kernel replaces torch only where it is clearly faster, and two runs that measure about the same
choose the same.

Invariant: nothing here needs a GPU. What measures is a `Timer`; one reads recorded timings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.tune.problem_json import shown
from qsync_fx.errors import QSyncError
from qsync_fx.precision import FORMATS

MARGIN: Final = 0.03
"""How much slower than the fastest a candidate may be and still win by coming earlier, as a fraction."""

ROUNDS: Final = 9

NARROW: Final = tuple(row.name for row in FORMATS.values() if row.dtype.itemsize == 1)
"""Formats of one byte: they are worth their conversions only where their products beat those of BF16."""

Candidate = KernelConfig | Literal["torch"]


class TuningError(QSyncError):
    """A problem that no candidate could be measured for, or a table that cannot be read or kept."""


class Timer(Protocol):
    """What measures the candidates of one problem."""

    def measure(self, candidate: Candidate) -> list[float]:
        """Returns the seconds of some runs, at least one.

        Raises:
            QSyncError: the candidate does not run here.
        """


@dataclass(frozen=True)
class Choice:
    """What tuning found out about one problem; a row of the tables that cost models read.

    Attributes:
        problem: a bucket (`problem.bucket()`).
        name: the winner: "torch", or the name of a `KernelConfig`.
        seconds: the median of each candidate that ran, by its name, in the order of the candidates.
        failed: why the others did not, by name.
        faster_than_bf16: of INT8 and FP8 problems, whether the winner beats the best candidate in BF16, or in FP16 where the device has no
            unit for BF16; None where that is not known, and for other formats.
        rounds: how often each candidate was measured.
    """

    problem: Problem
    name: str
    seconds: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)
    faster_than_bf16: bool | None = None
    rounds: int = ROUNDS

    @property
    def best(self) -> float:
        """Seconds of the winner."""
        return self.seconds[self.name]


def name_of(candidate: Candidate) -> str:
    """Returns what a candidate is called in tables."""
    return candidate if isinstance(candidate, str) else candidate.name


def tune(problem: Problem, candidates: Sequence[KernelConfig], timer: Timer, rounds: int = ROUNDS) -> Choice:
    """Measures torch and the candidates for one problem and chooses.

    Candidates take turns, and each round starts with another one, so that what a GPU does over time (clocks, heat) falls on all of them.

    Raises:
        TuningError: nothing could be measured, torch neither.
    """
    running: list[Candidate] = ["torch", *candidates]
    measured: dict[str, list[float]] = {name_of(candidate): [] for candidate in running}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        start = turn % max(1, len(running))
        for candidate in running[start:] + running[:start]:
            try:
                measured[name_of(candidate)] += _valid(timer.measure(candidate))
            except QSyncError as error:
                failed[name_of(candidate)] = error.what
        running = [candidate for candidate in running if name_of(candidate) not in failed]
    seconds = {name: statistics.median(values) for name, values in measured.items() if values and name not in failed}
    if not seconds:
        raise TuningError(
            f"no candidate could be measured: {next(iter(failed.values()), 'there is none')}",
            where=shown(problem),
            do="see what `qsync doctor` says of the device",
        )
    return Choice(problem, _winner(seconds), seconds, failed, None, rounds)


def _valid(values: Iterable[float]) -> list[float]:
    found = list(values)
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        raise TuningError("its timings are no positive numbers")
    return found


def _winner(seconds: Mapping[str, float]) -> str:
    fastest = min(seconds.values())
    return next(name for name, value in seconds.items() if value <= fastest * (1 + MARGIN))


def counterpart(problem: Problem, wide: str = "bf16") -> Problem | None:
    """Returns the problem in 16 bits that a problem in a narrow format has to beat, None for other formats."""
    if problem.a not in NARROW and problem.b not in NARROW:
        return None
    return replace(problem, a=wide, b=wide, a_scale="none", b_scale="none")


def gated(choice: Choice, wide: Choice | None) -> Choice:
    """Returns a choice with the answer whether its product beats that in 16 bits."""
    return choice if wide is None else replace(choice, faster_than_bf16=choice.best < wide.best)


def tune_all(
    problems: Iterable[Problem],
    candidates: Callable[[Problem], Sequence[KernelConfig]],
    timer: Callable[[Problem], Timer],
    rounds: int = ROUNDS,
    report: Callable[[Problem, Choice | None, str], None] = lambda problem, choice, why: None,
    wide: str = "bf16",
) -> list[Choice]:
    """Tunes each bucket of some problems, and the buckets in 16 bits that narrow formats are compared with.

    Args:
        problems: any; those of one bucket are tuned once.
        candidates: kernels to try for a problem.
        timer: what measures the candidates of a problem; released before the next one is made.
        rounds: of each candidate.
        report: called when a bucket is done, with its choice, or None and why there is none.
        wide: the format of 16 bits that the device has, as `hardware.wide` says.

    Returns:
        The choices, in the order in which buckets first occur, those in 16 bits last.
    """
    found: dict[Problem, Choice] = {}
    for problem in buckets(problems, wide):
        try:
            found[problem] = tune(problem, candidates(problem), timer(problem), rounds)
        except QSyncError as error:
            report(problem, None, error.what)
            continue
        report(problem, found[problem], "")
    others = {problem: counterpart(problem, wide) for problem in found}
    return [gated(choice, found.get(other) if (other := others[p]) else None) for p, choice in found.items()]


def buckets(problems: Iterable[Problem], wide: str = "bf16") -> list[Problem]:
    """Returns the buckets to be tuned for some problems, each once, with those in 16 bits that they are compared with."""
    own = list(dict.fromkeys(problem.bucket() for problem in problems))
    others = [other for problem in own if (other := counterpart(problem, wide)) is not None]
    return list(dict.fromkeys([*own, *others]))


def work(problem: Problem) -> tuple[int, int, int]:
    """Returns m, n, k of the matrix product that a problem is; a convolution's are those of its implicit one."""
    if isinstance(problem, GemmProblem):
        return problem.m, problem.n, problem.k
    pixels, window = problem.n * problem.p * problem.q, problem.r * problem.s
    match problem.operation:
        case "fprop":
            return pixels, problem.k, window * problem.c
        case "dgrad":
            return problem.n * problem.h * problem.w, problem.c, window * problem.k
        case "wgrad":
            return problem.k, window * problem.c, pixels
