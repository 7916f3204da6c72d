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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from qsync_fx.backend.cuda.config import Arch
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.problem_json import problem_as_json, problem_from
from qsync_fx.backend.cuda.table import Environment, environment_from, read_json
from qsync_fx.backend.cuda.tuning import Candidate, Timer, TuningError, name_of
from qsync_fx.errors import QSyncError

FORMAT: Final = "qsync recorded timings"
VERSION: Final = 1


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


def as_json(recording: Recording) -> dict[str, Any]:
    """Returns a recording as `load` reads it."""
    rows = [{"problem": problem_as_json(p), "seconds": dict(seconds)} for p, seconds in recording.timings.items()]
    head = {"format": FORMAT, "version": VERSION, "environment": asdict(recording.environment)}
    return {**head, "arch": recording.arch, "timings": rows}


def load(path: Path) -> Recording:
    """Returns the recording in a file; raises `TuningError` where it is none."""
    data = read_json(path)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise _wrong(path, f"it is no file of {FORMAT}, version {VERSION}")
    if data.get("arch") not in get_args(Arch):
        raise _wrong(path, f"its arch is none of {', '.join(get_args(Arch))}")
    rows = data.get("timings")
    if not isinstance(rows, list):
        raise _wrong(path, "it has no list of timings")
    found = dict(_row(row, path, at) for at, row in enumerate(rows))
    return Recording(environment_from(data.get("environment"), path), data["arch"], found)


def _row(row: object, path: Path, at: int) -> tuple[Problem, dict[str, list[float]]]:
    seconds = row.get("seconds") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(seconds, dict):
        raise _wrong(path, f"timing {at} is no problem with seconds")
    for name, values in seconds.items():
        numbers = isinstance(values, list) and all(type(v) in (int, float) for v in values)
        if not numbers or not values:
            raise _wrong(path, f"timing {at} has no seconds of {name[:60]!r}")
    try:
        return problem_from(row.get("problem"), f"{path}, timing {at}"), seconds
    except QSyncError as error:
        raise _wrong(path, error.what) from error


def _wrong(path: Path, why: str) -> TuningError:
    return TuningError(
        f"these are no recorded timings that can be used: {why}",
        where=str(path),
        do="record them with qsync tune --record FILE",
    )
