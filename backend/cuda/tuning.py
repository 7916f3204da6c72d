"""Autotuning: choice of the fastest candidate per problem, tuning tables, and recorded timings.

torch (cuBLAS, cuDNN) is always the first candidate. Candidates are measured in interleaved rounds,
the time of a candidate is the median of its rounds, and the earliest candidate within `MARGIN` of
the fastest median wins. A kernel therefore replaces torch only if it is clearly faster, and similar
measurements yield the same choice.

Tables and recordings are JSON files, fully validated before use. They contain names and numbers
only: a kernel is looked up by name among the candidates, never constructed from a file. Problems in
files must be problems that the operators can request.

Invariant: no GPU is required. A `Timer` measures; `RecordedTimer` reads recorded timings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from filelock import FileLock, Timeout

from qsync_fx.backend.cuda.kernel_config import OPERANDS, OUTPUTS, Arch, KernelConfig
from qsync_fx.backend.cuda.problem.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem_from_tensors import LARGEST_SIZE
from qsync_fx.errors import QSyncError
from qsync_fx.formats import FORMATS
from qsync_fx.serialization.schema import Check, Schema, reader, unstructured
from qsync_fx.serialization.strict_json import Malformed

PROBLEM_FORMATS: Final = tuple(dict.fromkeys(name for pair in OPERANDS for name in pair))
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "a": PROBLEM_FORMATS,
    "b": PROBLEM_FORMATS,
    "out": OUTPUTS,
}
_GEMM_SIZES: Final = ("m", "n", "k")
_CONV_SIZES: Final = ("n", "h", "w", "c", "k", "r", "s", "stride", "dilation")


def _gemm(problem: GemmProblem) -> str | None:
    return _common(problem, _GEMM_SIZES)


def _conv(problem: ConvProblem) -> str | None:
    if wrong := _common(problem, _CONV_SIZES):
        return wrong
    if not all(0 <= size <= LARGEST_SIZE for size in problem.padding):
        return _cannot("padding", problem.padding)
    return _cannot("r, s", (problem.r, problem.s)) if min(problem.p, problem.q) < 1 else None


def _common(problem: Problem, sizes: tuple[str, ...]) -> str | None:
    for name, available in _CHOICES.items():
        if (value := getattr(problem, name)) not in available:
            return _cannot(name, value)
    for name in sizes:
        value = getattr(problem, name)
        values = value if isinstance(value, tuple) else (value,)
        if not all(1 <= size <= LARGEST_SIZE for size in values):
            return _cannot(name, value)
    return None


def _cannot(name: str, value: object) -> str:
    return f"a problem cannot have {name} = {repr(value)[:60]}"


CHECKS: Final[Mapping[Any, Check]] = {GemmProblem: _gemm, ConvProblem: _conv}
"""Semantic checks of problems, for the schemas of files that contain them."""
_read_problem: Final = reader(Problem, CHECKS)


def problem_as_json(problem: Problem) -> dict[str, Any]:
    """Return a problem's fields and "kind": "gemm" or "conv"."""
    fields: dict[str, Any] = unstructured(problem)
    return fields


def problem_from(data: object, where: str) -> Problem:
    """Return the problem that JSON data describes; raise `QSyncError` with the invalid field."""
    try:
        result: Problem = _read_problem(data)
    except Malformed as wrong:
        place = ", ".join(filter(None, (where, wrong.where)))
        raise QSyncError(
            f"this is not a valid problem: {wrong.what.strip()}", where=place, do=wrong.do or None
        ) from None
    return result


def shown(problem: Problem) -> str:
    """Return a problem in one line, for tables and reasons."""
    formats = problem.a if problem.a == problem.b else f"{problem.a} x {problem.b}"
    if isinstance(problem, GemmProblem):
        layout = {"row": "n", "column": "t"}
        majors = layout[problem.a_major] + layout[problem.b_major]
        return f"gemm {problem.m} x {problem.n} x {problem.k} {majors} {formats} -> {problem.out}"
    p = problem
    window = f"{p.r} x {p.s}" + (f" / {p.stride[0]}" if max(p.stride) > 1 else "")
    return (
        f"{p.operation} {p.n} x {p.h} x {p.w}, {p.c} to {p.k} channels, {window}, {formats} -> "
        f"{p.out}"
    )


MARGIN: Final = 0.03
"""Tolerance for choosing an earlier candidate, as a fraction of the fastest time."""

ROUNDS: Final = 9

NARROW: Final = tuple(row.name for row in FORMATS.values() if row.dtype.itemsize == 1)
"""One-byte formats, which pay for their casts only if their products are faster than BF16."""

Candidate = KernelConfig | Literal["torch"]


class TuningError(QSyncError):
    """No candidate of a problem could be measured, or a table cannot be read or written."""


class Timer(Protocol):
    """Timer of the candidates of one problem."""

    def measure(self, candidate: Candidate) -> list[float]:
        """Return the seconds of some runs, at least one.

        Raises:
            QSyncError: the candidate does not run here.
        """


@dataclass(frozen=True)
class TunedChoice:
    """Tuning result of one problem; a row of a tuning table, which cost models read.

    Attributes:
        problem: a bucket (`problem.bucket()`).
        name: the winner: "torch", or the name of a `KernelConfig`.
        seconds: median seconds by name, of each candidate that ran, in the order of the candidates.
        failed: reason by name, of the other candidates.
        faster_than_bf16: for INT8 and FP8 problems, whether the winner is faster than the best
            candidate in BF16, or in FP16 if the device has no unit for BF16; None if unknown, and
            for other formats.
        rounds: measurements per candidate.
    """

    problem: Problem
    name: str
    seconds: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)
    faster_than_bf16: bool | None = None
    rounds: int = ROUNDS

    @property
    def best(self) -> float:
        """Median seconds of the winner."""
        return self.seconds[self.name]


def name_of(candidate: Candidate) -> str:
    """Return the name of a candidate in tables."""
    return candidate if isinstance(candidate, str) else candidate.name


def tune(
    problem: Problem, candidates: Sequence[KernelConfig], timer: Timer, rounds: int = ROUNDS
) -> TunedChoice:
    """Measure torch and the candidates for one problem and choose.

    Each round starts with another candidate, so that changes over time (clocks, heat) affect all of
    them.

    Raises:
        TuningError: neither torch nor any candidate could be measured.
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
    seconds = {
        name: statistics.median(values)
        for name, values in measured.items()
        if values and name not in failed
    }
    if not seconds:
        raise TuningError(
            "no candidate could be measured: "
            f"{next(iter(failed.values()), 'no kernel supports this problem')}",
            where=shown(problem),
            do="run `qsync doctor` to check the device",
        )
    return TunedChoice(problem, _winner(seconds), seconds, failed, None, rounds)


def _valid(values: Iterable[float]) -> list[float]:
    result = list(values)
    if not result or not all(math.isfinite(value) and value > 0 for value in result):
        raise TuningError("its timings are not positive numbers")
    return result


def _winner(seconds: Mapping[str, float]) -> str:
    fastest = min(seconds.values())
    return next(name for name, value in seconds.items() if value <= fastest * (1 + MARGIN))


def counterpart(problem: Problem, wide: str = "bf16") -> Problem | None:
    """Return the 16-bit problem that a narrow one must be faster than; None for other formats."""
    if problem.a not in NARROW and problem.b not in NARROW:
        return None
    return replace(problem, a=wide, b=wide, a_scale="none", b_scale="none")


def gated(choice: TunedChoice, wide: TunedChoice | None) -> TunedChoice:
    """Return a choice with `faster_than_bf16` set from the choice in 16 bits, if there is one."""
    return choice if wide is None else replace(choice, faster_than_bf16=choice.best < wide.best)


def tune_all(
    problems: Iterable[Problem],
    candidates: Callable[[Problem], Sequence[KernelConfig]],
    timer: Callable[[Problem], Timer],
    rounds: int = ROUNDS,
    report: Callable[[Problem, TunedChoice | None, str], None] = lambda problem, choice, why: None,
    wide: str = "bf16",
) -> list[TunedChoice]:
    """Tune the buckets of some problems, and their 16-bit counterparts.

    Args:
        problems: problems; those in one bucket are tuned once.
        candidates: returns the kernels to measure for a problem.
        timer: returns the timer of a problem, which is released before the next one is created.
        rounds: measurements per candidate.
        report: called for each finished bucket, with its choice, or None and the reason of failure.
        wide: the 16-bit format of the device, see `kernel_config.wide`.

    Returns:
        The choices, in the order in which buckets first occur, 16-bit counterparts last.
    """
    result: dict[Problem, TunedChoice] = {}
    for problem in buckets(problems, wide):
        try:
            result[problem] = tune(problem, candidates(problem), timer(problem), rounds)
        except QSyncError as error:
            report(problem, None, error.what)
            continue
        report(problem, result[problem], "")
    others = {problem: counterpart(problem, wide) for problem in result}
    return [
        gated(choice, result.get(other) if (other := others[p]) else None)
        for p, choice in result.items()
    ]


def buckets(problems: Iterable[Problem], wide: str = "bf16") -> list[Problem]:
    """Return the distinct buckets to tune for some problems, and their 16-bit counterparts."""
    owned = list(dict.fromkeys(problem.bucket() for problem in problems))
    others = [other for problem in owned if (other := counterpart(problem, wide)) is not None]
    return list(dict.fromkeys([*owned, *others]))


def work(problem: Problem) -> tuple[int, int, int]:
    """Return (m, n, k) of a problem's matrix product; of the implicit GEMM for a convolution."""
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


LARGEST_FILE: Final = 64 * 2**20
_LONGEST: Final = 400
_PATIENCE: Final = 60.0
"""Seconds to wait for another process that writes the same table."""


@dataclass(frozen=True)
class Environment:
    """Environment of timings: GPU and versions. `abi` is the version of the C interface."""

    gpu: str
    driver: str
    cuda: str
    torch: str
    cutlass: str
    abi: int

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the hash of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TuningTable:
    """Tuning results of one environment, by bucket.

    Its JSON file has the fields

        format       "qsync tuning table"
        version      1
        environment  gpu, driver, cuda, torch, cutlass: text; abi: a number
        choices      a list of
            problem            kind ("gemm" or "conv") and the fields of the problem class,
                               with the sizes of the bucket
            name               the winner: "torch" or the name of a kernel
            seconds            name -> median seconds, every candidate that ran
            failed             name -> reason of failure
            faster_than_bf16   true, false or null; see `TunedChoice`
            rounds             measurements per candidate

    Each environment has its own file. Files are replaced atomically under a lock; rows of other
    problems are preserved.
    """

    environment: Environment
    choices: Mapping[Problem, TunedChoice] = field(default_factory=dict)

    def choice(self, problem: Problem) -> TunedChoice | None:
        """Return the choice of a problem's bucket, if any."""
        return self.choices.get(problem.bucket())

    def updated(self, choices: Iterable[TunedChoice]) -> TuningTable:
        """Return a table in which these choices replace older ones for the same problems."""
        return TuningTable(
            self.environment, {**self.choices, **{choice.problem: choice for choice in choices}}
        )


def path_in(folder: Path, environment: Environment) -> Path:
    """Return the path of the table of an environment."""
    return folder / f"{environment.digest}.json"


def load_table(path: Path, environment: Environment | None = None) -> TuningTable:
    """Return the table in a file; an empty one if the file does not exist and `environment` is set.

    Raises:
        TuningError: the file cannot be read, is no table of this version, or is of another
            environment.
    """
    if environment is not None and not path.exists():
        return TuningTable(environment)
    rows = TABLE.load(path)
    if environment is not None and rows.environment != environment:
        raise TuningError(
            f"the tuning table was measured in another environment: {rows.environment}",
            where=str(path),
            do="delete it; `qsync tune` writes a new one",
        )
    return TuningTable(rows.environment, {choice.problem: choice for choice in rows.choices})


def save_table(path: Path, environment: Environment, choices: Iterable[TunedChoice]) -> TuningTable:
    """Merge choices into the table at `path` under a lock and return the result.

    An unreadable file is renamed with the suffix `.unreadable`.

    Raises:
        QSyncError: the folder is not writable, or another process locks the table for a minute.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_PATIENCE):
            table = _present(path, environment).updated(choices)
            rows = [_short(choice) for choice in table.choices.values()]
            TABLE.write(path, TABLE.encode(_Rows(environment, rows)))
            return table


def check_writable(path: Path) -> None:
    """Create the folder of the table at `path`, before any measurement.

    Raises:
        TuningError: no table can be written there.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        TABLE.check_writable(path)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except Timeout:
        raise TuningError(
            "another process has been writing to the tuning table for a minute",
            where=str(path),
            do=f"wait until it ends; if there is no such process, delete {path}.lock",
        ) from None
    except OSError as error:
        raise TuningError(
            f"the tuning table cannot be written: {error.strerror or error}",
            where=str(path),
            do="check that the folder is writable",
        ) from error


def _present(path: Path, environment: Environment) -> TuningTable:
    try:
        return load_table(path, environment)
    except TuningError:
        path.replace(path.with_name(path.name + ".unreadable"))
        return TuningTable(environment)


@dataclass(frozen=True)
class _Rows:
    environment: Environment
    choices: list[TunedChoice]


def choice_as_json(choice: TunedChoice) -> dict[str, Any]:
    """Return one row of a table."""
    row: dict[str, Any] = unstructured(_short(choice))
    return row


def _short(choice: TunedChoice) -> TunedChoice:
    return replace(choice, failed={name: why[:_LONGEST] for name, why in choice.failed.items()})


def _check_choice(choice: TunedChoice) -> str | None:
    if choice.problem != choice.problem.bucket():
        return "the sizes of its problem belong to no size bucket"
    if choice.name not in choice.seconds:
        return "the fastest kernel has no timing"
    if any(map(_long, (*choice.seconds, *choice.failed, *choice.failed.values()))):
        return f"a name or a reason is longer than {_LONGEST} characters"
    if not all(value > 0 for value in choice.seconds.values()):
        return "timings are not positive"
    return None if choice.rounds > 0 else f"the number of its rounds is {choice.rounds}"


def _long(value: object) -> bool:
    return isinstance(value, str) and len(value) > _LONGEST


def _check_environment(result: Environment) -> str | None:
    for name, value in vars(result).items():
        if _long(value):
            return f"{name} is too long"
    return None


ENVIRONMENT: Final[Mapping[Any, Check]] = {Environment: _check_environment}
"""Semantic checks of environments, for the schemas of files that contain them."""
TABLE: Final = Schema(
    _Rows,
    noun="tuning table",
    error=TuningError,
    remedy="delete it; `qsync tune` writes a new one",
    name="qsync tuning table",
    largest=LARGEST_FILE,
    checks={**CHECKS, **ENVIRONMENT, TunedChoice: _check_choice},
)


@dataclass(frozen=True)
class TimingRecording:
    """Recorded timings of one environment: the seconds of every run, by problem and candidate name.

    They allow tuning without a GPU. The JSON file has the fields

        format        "qsync recorded timings"
        version       1
        environment   as in a tuning table
        arch          "sm_90a" or another of `kernel_config.ARCHITECTURES`
        timings       a list of {problem: ..., seconds: {name: [seconds, ...]}},
                      names as in a tuning table
    """

    environment: Environment
    arch: Arch
    timings: Mapping[Problem, Mapping[str, list[float]]]

    def timer(self, problem: Problem) -> RecordedTimer:
        """Return the timer of a problem, recorded under itself or its bucket."""
        return RecordedTimer(self.timings.get(problem) or self.timings.get(problem.bucket()) or {})


@dataclass(frozen=True)
class RecordedTimer:
    """Timer that returns recorded timings; all rounds are equal."""

    seconds: Mapping[str, list[float]]

    def measure(self, candidate: Candidate) -> list[float]:
        if name_of(candidate) not in self.seconds:
            raise TuningError("the recorded timings do not contain this problem")
        return self.seconds[name_of(candidate)]


@dataclass
class RecordingTimer:
    """Timer that records the measurements of another timer, which may be dropped afterwards."""

    timer: Timer | None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, candidate: Candidate) -> list[float]:
        assert self.timer is not None
        result = self.timer.measure(candidate)
        self.seconds.setdefault(name_of(candidate), []).extend(result)
        return result


@dataclass(frozen=True)
class _Row:
    problem: Problem
    seconds: dict[str, list[float]]


@dataclass(frozen=True)
class _RecordedRows:
    environment: Environment
    arch: Arch
    timings: list[_Row]


def save_recording(path: Path, recording: TimingRecording) -> None:
    """Write a recording to `path` atomically; raise `TuningError` on failure."""
    rows = [_Row(problem, dict(seconds)) for problem, seconds in recording.timings.items()]
    RECORDING.write(
        path, RECORDING.encode(_RecordedRows(recording.environment, recording.arch, rows))
    )


def load_recording(path: Path) -> TimingRecording:
    """Return the recording in a file; raise `TuningError` if it is invalid."""
    result = RECORDING.load(path)
    return TimingRecording(
        result.environment, result.arch, {row.problem: row.seconds for row in result.timings}
    )


def _check(row: _Row) -> str | None:
    for name, values in row.seconds.items():
        if not values:
            return f"there is no timing of {name[:60]!r}"
    return None


RECORDING: Final = Schema(
    _RecordedRows,
    noun="recording",
    error=TuningError,
    remedy="record timings with `qsync tune --record FILE`",
    name="qsync recorded timings",
    largest=LARGEST_FILE,
    checks={**CHECKS, **ENVIRONMENT, _Row: _check},
)
