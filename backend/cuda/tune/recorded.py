"""Recorded timings: what a GPU measured once, as a file that decides without one.

Invariant: hostile until checked, as tables are. A file:

    format        "qsync recorded timings"
    version       1
    environment   as in a tuning table
    arch          "sm_90a" or another of `config.ARCHITECTURES`
    timings       a list of {problem: ..., seconds: {name: [seconds, ...]}}, names as in a tuning table
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from qsync_fx.backend.cuda.kernel.config import Arch
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.tune import problem_json
from qsync_fx.backend.cuda.tune.table import ENVIRONMENT, LARGEST_FILE, Environment
from qsync_fx.backend.cuda.tune.tuning import Candidate, Timer, TuningError, name_of
from qsync_fx.codec import Schema


@dataclass(frozen=True)
class Recording:
    """Timings of one environment: the seconds of every run, by problem and name of the candidate."""

    environment: Environment
    arch: Arch
    timings: Mapping[Problem, Mapping[str, list[float]]]

    def timer(self, problem: Problem) -> RecordedTimer:
        """Returns the timer of a problem, recorded as such or under its bucket."""
        return RecordedTimer(self.timings.get(problem) or self.timings.get(problem.bucket()) or {})


@dataclass(frozen=True)
class RecordedTimer:
    """Measures by reading; every round reads the same."""

    seconds: Mapping[str, list[float]]

    def measure(self, candidate: Candidate) -> list[float]:
        if name_of(candidate) not in self.seconds:
            raise TuningError("no timings of it are recorded")
        return self.seconds[name_of(candidate)]


@dataclass
class Keeper:
    """A timer that keeps what another one measures, for a recording. `timer` may be dropped when it has measured."""

    timer: Timer | None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, candidate: Candidate) -> list[float]:
        assert self.timer is not None
        found = self.timer.measure(candidate)
        self.seconds.setdefault(name_of(candidate), []).extend(found)
        return found


@dataclass(frozen=True)
class _Row:
    problem: Problem
    seconds: dict[str, list[float]]


@dataclass(frozen=True)
class _Rows:
    """A recording as its file holds it."""

    environment: Environment
    arch: Arch
    timings: list[_Row]


def save(path: Path, recording: Recording) -> None:
    """Writes a recording to `path` in one step; raises `TuningError` if it cannot."""
    rows = [_Row(problem, dict(seconds)) for problem, seconds in recording.timings.items()]
    RECORDING.write(path, RECORDING.encode(_Rows(recording.environment, recording.arch, rows)))


def load(path: Path) -> Recording:
    """Returns the recording in a file; raises `TuningError` where it is none."""
    found = RECORDING.load(path)
    return Recording(found.environment, found.arch, {row.problem: row.seconds for row in found.timings})


def _check(row: _Row) -> str | None:
    return next((f"there are no seconds of {name[:60]!r}" for name, values in row.seconds.items() if not values), None)


RECORDING: Final = Schema(
    _Rows,
    noun="recording",
    error=TuningError,
    remedy="record timings with qsync tune --record FILE",
    name="qsync recorded timings",
    largest=LARGEST_FILE,
    checks={**problem_json.CHECKS, **ENVIRONMENT, _Row: _check},
)
