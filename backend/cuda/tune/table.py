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

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.tune import problem_json
from qsync_fx.backend.cuda.tune.tuning import Choice, TuningError
from qsync_fx.codec import Check, Schema

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
    rows = TABLE.load(path)
    if environment is not None and rows.environment != environment:
        raise TuningError(
            f"the tuning table was measured in another environment: {rows.environment}",
            where=str(path),
            do="remove it; `qsync tune` writes a new one",
        )
    return Table(rows.environment, {choice.problem: choice for choice in rows.choices})


def save(path: Path, environment: Environment, choices: Iterable[Choice]) -> Table:
    """Merges choices into the table at `path`, which other processes may do at the same time, and returns the whole.

    A file that cannot be read is kept beside the new one, with `.unreadable` at the end of its name.

    Raises:
        QSyncError: the folder cannot be written to, or another process holds the table for a minute.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_PATIENCE):
            table = _present(path, environment).updated(choices)
            TABLE.write(path, TABLE.encode(_Rows(environment, [_short(choice) for choice in table.choices.values()])))
            return table


def check_writable(path: Path) -> None:
    """Makes the folder of the table at `path`; raises `TuningError` where no table can be written, before anything is measured for it."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        TABLE.check_writable(path)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
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


@dataclass(frozen=True)
class _Rows:
    """A table as its file holds it."""

    environment: Environment
    choices: list[Choice]


def choice_as_json(choice: Choice) -> dict[str, Any]:
    """Returns one row of a table."""
    row: dict[str, Any] = TABLE.part(_short(choice))
    return row


def _short(choice: Choice) -> Choice:
    return replace(choice, failed={name: why[:_LONGEST] for name, why in choice.failed.items()})


def _check_choice(choice: Choice) -> str | None:
    if choice.problem != choice.problem.bucket():
        return "the sizes of its problem are those of no bucket"
    if choice.name not in choice.seconds:
        return "the winner has no seconds"
    if any(map(_long, (*choice.seconds, *choice.failed, *choice.failed.values()))):
        return f"a name or a reason is longer than {_LONGEST} characters"
    if not all(value > 0 for value in choice.seconds.values()):
        return "seconds are not positive"
    return None if choice.rounds > 0 else f"it was measured in {choice.rounds} rounds"


def _long(value: object) -> bool:
    return isinstance(value, str) and len(value) > _LONGEST


def _check_environment(found: Environment) -> str | None:
    return next((f"{name} is too long" for name, value in vars(found).items() if _long(value)), None)


ENVIRONMENT: Final[Mapping[Any, Check]] = {Environment: _check_environment}
"""What types do not say of environments, for the schemas of files that hold one."""
TABLE: Final = Schema(
    _Rows,
    noun="tuning table",
    error=TuningError,
    remedy="remove it; `qsync tune` writes a new one",
    name="qsync tuning table",
    largest=LARGEST_FILE,
    checks={**problem_json.CHECKS, **ENVIRONMENT, Choice: _check_choice},
)
