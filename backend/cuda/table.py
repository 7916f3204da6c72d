"""Tables of what tuning measured, on disk: one file for each environment that timings hold in.

Invariant: a file is JSON, checked field by field before anything is believed, and holds names and numbers alone: a kernel is looked up by
its name among the candidates, never made from what a file says. Files are replaced whole, under a lock, and rows of other problems stay.

A file (cost models read these):

    format       "qsync tuning table"
    version      1
    environment  gpu, driver, cuda, torch, cutlass: versions; abi: a number. Timings of one environment say little of another
    choices      a list of
        problem            kind ("gemm" or "conv") and the fields of `problem.GemmProblem` or `problem.ConvProblem`, sizes of the bucket
        name               the winner: "torch" or the name of a kernel
        seconds            name -> median seconds, every candidate that ran
        failed             name -> why it did not run
        faster_than_bf16   true, false or null; see `tuning.Choice`
        rounds             how often each was measured
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.problem_json import problem_as_json, problem_from
from qsync_fx.backend.cuda.tuning import Choice, TuningError
from qsync_fx.errors import QSyncError
from qsync_fx.files import write_text

VERSION: Final = 1
FORMAT: Final = "qsync tuning table"
LARGEST_FILE: Final = 64 * 2**20
_LONGEST: Final = 400
_PATIENCE: Final = 60.0
"""Seconds to wait for another process that writes the same table."""


@dataclass(frozen=True)
class Environment:
    """What timings depend on beside the problem. Versions as text; `abi` is that of compiled kernels."""

    gpu: str
    driver: str
    cuda: str
    torch: str
    cutlass: str
    abi: int

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of everything."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Table:
    """What was measured in one environment, by bucket."""

    environment: Environment
    choices: Mapping[Problem, Choice] = field(default_factory=dict)

    def choice(self, problem: Problem) -> Choice | None:
        """Returns what is known of a problem's bucket."""
        return self.choices.get(problem.bucket())

    def updated(self, choices: Iterable[Choice]) -> Table:
        """Returns the table with these choices in place of older ones for the same problems."""
        return Table(self.environment, {**self.choices, **{choice.problem: choice for choice in choices}})


def path_in(folder: Path, environment: Environment) -> Path:
    """Returns where the table of an environment is kept."""
    return folder / f"{environment.digest}.json"


def load(path: Path, environment: Environment | None = None) -> Table:
    """Returns the table in a file; an empty one where there is no file and an environment is given.

    Raises:
        TuningError: the file cannot be read, is no table of this version, or is one of another environment.
    """
    if environment is not None and not path.exists():
        return Table(environment)
    data = read_json(path)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise _unreadable(path, f"it is no {FORMAT} of version {VERSION}")
    found = environment_from(data.get("environment"), path)
    if environment is not None and found != environment:
        raise _unreadable(path, f"it was measured in another environment: {found}")
    rows = data.get("choices")
    if not isinstance(rows, list):
        raise _unreadable(path, "it has no list of choices")
    choices = [_choice(row, f"{path}, choice {at}", path) for at, row in enumerate(rows)]
    return Table(found, {choice.problem: choice for choice in choices})


def save(path: Path, environment: Environment, choices: Iterable[Choice]) -> Table:
    """Merges choices into the table at `path`, which other processes may do at the same time, and returns the whole.

    A file that cannot be read is kept beside the new one, with `.unreadable` at the end of its name.

    Raises:
        QSyncError: the folder cannot be written to, or another process holds the table for a minute.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_PATIENCE):
            table = _present(path, environment).updated(choices)
            write_text(path, json.dumps(as_json(table), indent=1))
            return table
    except Timeout:
        raise TuningError(
            "another process has been writing the tuning table for a minute",
            where=str(path),
            do=f"wait for it; if there is none, remove {path}.lock",
        ) from None
    except OSError as error:
        raise TuningError(
            f"the tuning table cannot be written: {error.strerror or error}",
            where=str(path),
            do="check that the folder is writable",
        ) from error


def _present(path: Path, environment: Environment) -> Table:
    try:
        return load(path, environment)
    except TuningError:
        path.replace(path.with_name(path.name + ".unreadable"))
        return Table(environment)


def as_json(table: Table) -> dict[str, Any]:
    """Returns the table as it is written."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "environment": asdict(table.environment),
        "choices": [choice_as_json(choice) for choice in table.choices.values()],
    }


def choice_as_json(choice: Choice) -> dict[str, Any]:
    """Returns one row of a table."""
    return {
        "problem": problem_as_json(choice.problem),
        "name": choice.name,
        "seconds": dict(choice.seconds),
        "failed": {name: why[:_LONGEST] for name, why in choice.failed.items()},
        "faster_than_bf16": choice.faster_than_bf16,
        "rounds": choice.rounds,
    }


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises `TuningError` where there is none, or an absurdly large one."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise _unreadable(path, f"it is larger than {LARGEST_FILE >> 20} MB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, str(error.strerror or error)) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"it is no JSON ({error})") from error
    if not isinstance(data, dict):
        raise _unreadable(path, "it is no JSON object")
    return data


def environment_from(data: object, path: Path) -> Environment:
    """Returns the environment that JSON describes; raises `TuningError` where it does not."""
    if not isinstance(data, dict) or set(data) != {f.name for f in fields(Environment)}:
        raise _unreadable(path, "its environment is incomplete")
    texts = {name: value for name, value in data.items() if name != "abi"}
    if type(data["abi"]) is not int or not all(_text(value) for value in texts.values()):
        raise _unreadable(path, "its environment is no list of versions")
    return Environment(**data)


def _choice(row: object, where: str, path: Path) -> Choice:
    if not isinstance(row, dict):
        raise _unreadable(path, f"{where} is no JSON object")
    try:
        problem = problem_from(row.get("problem"), where)
    except QSyncError as error:
        raise _unreadable(path, error.what) from error
    name, seconds, failed = row.get("name"), row.get("seconds"), row.get("failed", {})
    faster, rounds = row.get("faster_than_bf16"), row.get("rounds")
    good = (
        problem == problem.bucket()
        and isinstance(seconds, dict)
        and _text(name)
        and name in seconds
        and all(_text(key) and _seconds(value) for key, value in seconds.items())
        and isinstance(failed, dict)
        and all(_text(key) and _text(value) for key, value in failed.items())
        and (faster is None or isinstance(faster, bool))
        and type(rounds) is int
        and rounds > 0
    )
    if not good:
        raise _unreadable(path, f"{where} is not what tuning writes")
    return Choice(problem, name, {k: float(v) for k, v in seconds.items()}, failed, faster, rounds)  # type: ignore[arg-type, union-attr]


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _unreadable(path: Path, why: str) -> TuningError:
    return TuningError(
        f"this is no tuning table that can be used: {why}",
        where=str(path),
        do="remove it; `qsync tune` writes a new one",
    )
