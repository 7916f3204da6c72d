"""Autotuning: choice of the fastest candidate per problem, tuning tables, and recorded timings.

Candidates are measured in interleaved rounds, and the earliest one within `MARGIN` of the fastest
median wins. torch (cuBLAS, cuDNN) is always the first, so a kernel replaces it only if it is
clearly faster. Files contain names and numbers only: kernels are looked up, never constructed.
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
from qsync_fx.backend.cuda.layer_times import LayerTimes, check_layer, layer_problem
from qsync_fx.backend.cuda.problem.problem import LARGEST_SIZE, ConvProblem, GemmProblem, Problem
from qsync_fx.errors import QSyncError
from qsync_fx.formats import FORMATS
from qsync_fx.serialization.schema import Check, Schema, unstructured

_OPERAND_FORMATS: Final = {name for pair in OPERANDS for name in pair}
_FORMATS: Final = {"a": _OPERAND_FORMATS, "b": _OPERAND_FORMATS, "out": set(OUTPUTS)}


def _check_problem(problem: Problem) -> str | None:
    for name, value in vars(problem).items():
        sizes = value if isinstance(value, tuple) else (value,)
        least = int(name != "padding")
        valid = all(least <= size <= LARGEST_SIZE for size in sizes if type(size) is int)
        if value not in _FORMATS.get(name, (value,)) or not valid:
            return f"a problem cannot have {name} = {repr(value)[:60]}"
    if isinstance(problem, ConvProblem) and min(problem.p, problem.q) < 1:
        return f"a problem cannot have r, s = {problem.r}, {problem.s}"
    return None


def shown(problem: Problem) -> str:
    """Return a problem in one line, for tables and reasons."""
    formats = " x ".join(dict.fromkeys((problem.a, problem.b)))
    if isinstance(problem, GemmProblem):
        layout = {"row": "n", "column": "t"}
        majors = layout[problem.a_major] + layout[problem.b_major]
        return f"gemm {problem.m} x {problem.n} x {problem.k} {majors} {formats} -> {problem.out}"
    p = problem
    window = f"{p.r} x {p.s}"
    if max(p.stride) > 1:
        window += f" / {p.stride[0]}"
    image = f"{p.n} x {p.h} x {p.w}, {p.c} to {p.k} channels"
    return f"{p.operation} {image}, {window}, {formats} -> {p.out}"


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
        """Return the seconds of some runs; raise `QSyncError` if the candidate does not run."""


@dataclass(frozen=True)
class TunedChoice:
    """Tuning result of one problem; a row of a tuning table, which cost models read.

    Attributes:
        problem: a bucket (`problem.bucket()`).
        name: the winner: "torch", or the name of a `KernelConfig`.
        seconds: median seconds by name, of each candidate that ran, in the order of the candidates.
        failed: reason by name, of the others.
        faster_than_bf16: for INT8 and FP8 problems, whether the winner is faster than the best
            candidate in BF16, or in FP16 if the device has no unit for BF16; None if unknown, and
            for other formats.
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
    them. Raise `TuningError` if neither torch nor any candidate can be measured.
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
    names = map(name_of, running)
    seconds = {name: statistics.median(values) for name in names if (values := measured[name])}
    if not seconds:
        why = next(iter(failed.values()), "no kernel supports this problem")
        raise TuningError(
            f"no candidate could be measured: {why}",
            where=shown(problem),
            do="run `qsync doctor` to check the device",
        )
    limit = min(seconds.values()) * (1 + MARGIN)
    winner = next(name for name, value in seconds.items() if value <= limit)
    return TunedChoice(problem, winner, seconds, failed, None, rounds)


def _valid(values: Iterable[float]) -> list[float]:
    result = list(values)
    if not result or not all(math.isfinite(value) and value > 0 for value in result):
        raise TuningError("its timings are not positive numbers")
    return result


def counterpart(problem: Problem, wide: str = "bf16") -> Problem | None:
    """Return the 16-bit problem that a narrow one must be faster than; None for other formats."""
    if problem.a not in NARROW and problem.b not in NARROW:
        return None
    return replace(problem, a=wide, b=wide, a_scale="none", b_scale="none")


def tune_all(
    problems: Iterable[Problem],
    candidates: Callable[[Problem], Sequence[KernelConfig]],
    timer: Callable[[Problem], Timer],
    rounds: int = ROUNDS,
    report: Callable[[Problem, TunedChoice | None, str], None] = lambda problem, choice, why: None,
    wide: str = "bf16",
) -> list[TunedChoice]:
    """Return the choices for the buckets of problems, then for their 16-bit counterparts.

    Args:
        timer: returns the timer of a problem, which is released before the next one is created.
        report: called for each finished bucket, with its choice, or None and the reason of failure.
        wide: the 16-bit format of the device, see `kernel_config.wide`.
    """
    result: dict[Problem, TunedChoice] = {}
    for problem in buckets(problems, wide):
        try:
            result[problem] = tune(problem, candidates(problem), timer(problem), rounds)
        except QSyncError as error:
            report(problem, None, error.what)
        else:
            report(problem, result[problem], "")
    choices = []
    for problem, choice in result.items():
        other = counterpart(problem, wide)
        if other is not None and other in result:
            choice = replace(choice, faster_than_bf16=choice.best < result[other].best)
        choices.append(choice)
    return choices


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


_LARGEST_FILE: Final = 64 * 2**20
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
    """Tuning results of one environment; docs/kernels.md describes the file.

    Attributes:
        choices: fastest kernels of products, by bucket.
        layers: times of layers, by `layer_problem` and narrow format.
    """

    environment: Environment
    choices: Mapping[Problem, TunedChoice] = field(default_factory=dict)
    layers: Mapping[tuple[Problem, str], LayerTimes] = field(default_factory=dict)

    def choice(self, problem: Problem) -> TunedChoice | None:
        """Return the choice of a problem's bucket, if any."""
        return self.choices.get(problem.bucket())

    def layer(self, output: Problem, precision: str, wide: str) -> LayerTimes | None:
        """Return the measured times of the layer with this output product, if any."""
        return self.layers.get((layer_problem(output, wide), precision))


def path_in(folder: Path, environment: Environment) -> Path:
    """Return the path of the table of an environment."""
    return folder / f"{environment.digest}.json"


def load_table(path: Path, environment: Environment | None = None) -> TuningTable:
    """Return the table in a file; an empty one if the file does not exist and `environment` is set.

    Raise `TuningError` if the file is no valid table, or is of another environment.
    """
    if environment is not None and not path.exists():
        return TuningTable(environment)
    rows: _Rows = TABLE.load(path)
    if environment is not None and rows.environment != environment:
        raise TuningError(
            f"the tuning table was measured in another environment: {rows.environment}",
            where=str(path),
            do="delete it; `qsync tune` writes a new one",
        )
    choices = {choice.problem: choice for choice in rows.choices}
    return TuningTable(rows.environment, choices, by_layer(rows.layers))


def by_layer(layers: Iterable[LayerTimes]) -> dict[tuple[Problem, str], LayerTimes]:
    """Return layers by their problem and narrow format."""
    return {(times.problem, times.precision): times for times in layers}


def save_table(
    path: Path,
    environment: Environment,
    choices: Iterable[TunedChoice],
    layers: Iterable[LayerTimes] = (),
) -> TuningTable:
    """Merge choices and layers into the table at `path` under a lock and return the result.

    An unreadable file is renamed with the suffix `.unreadable`.
    """
    with _writing(path), FileLock(f"{path}.lock", timeout=_PATIENCE):
        try:
            table = load_table(path, environment)
        except TuningError:
            path.replace(path.with_name(path.name + ".unreadable"))
            table = TuningTable(environment)
        table = replace(
            table,
            choices={**table.choices, **{c.problem: c for c in choices}},
            layers={**table.layers, **by_layer(layers)},
        )
        rows = [_short(choice) for choice in table.choices.values()]
        value = _Rows(environment, rows, list(table.layers.values()))
        TABLE.write(path, TABLE.encode(value))
        return table


def check_writable(path: Path) -> None:
    """Create the folder of the table at `path`; raise `TuningError` if it is not writable."""
    with _writing(path):
        TABLE.check_writable(path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Create the folder of a table; raise `TuningError` for what prevents writing there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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


@dataclass(frozen=True)
class _Rows:
    environment: Environment
    choices: list[TunedChoice]
    layers: list[LayerTimes] = field(default_factory=list)


def choice_as_json(choice: TunedChoice) -> dict[str, Any]:
    """Return one row of a table."""
    return unstructured(_short(choice))  # type: ignore[no-any-return]


def layer_as_json(times: LayerTimes) -> dict[str, Any]:
    """Return one layer of a table."""
    return unstructured(times)  # type: ignore[no-any-return]


def problem_as_json(problem: Problem) -> dict[str, Any]:
    """Return a problem's fields and "kind": "gemm" or "conv"."""
    return unstructured(problem)  # type: ignore[no-any-return]


def _short(choice: TunedChoice) -> TunedChoice:
    return replace(choice, failed={name: why[:_LONGEST] for name, why in choice.failed.items()})


def _check_choice(choice: TunedChoice) -> str | None:
    if choice.problem != choice.problem.bucket():
        return "the sizes of its problem belong to no size bucket"
    if choice.name not in choice.seconds:
        return "the fastest kernel has no timing"
    if max(map(len, (*choice.seconds, *choice.failed, *choice.failed.values()))) > _LONGEST:
        return f"a name or a reason is longer than {_LONGEST} characters"
    if min(choice.seconds.values()) <= 0:
        return "timings are not positive"
    if choice.rounds < 1:
        return f"the number of its rounds is {choice.rounds}"
    return None


_CHECKS: Final[Mapping[Any, Check]] = {
    GemmProblem: _check_problem,
    ConvProblem: _check_problem,
    TunedChoice: _check_choice,
    LayerTimes: check_layer,
}
TABLE: Final = Schema(
    _Rows,
    noun="tuning table",
    error=TuningError,
    remedy="delete it; `qsync tune` writes a new one",
    name="qsync tuning table",
    largest=_LARGEST_FILE,
    checks=_CHECKS,
)


@dataclass(frozen=True)
class TimingRecording:
    """Seconds of every run in one environment, by problem and candidate; for tuning without GPU.

    `layers` are the times of layers, by `layer_problem` and narrow format.
    """

    environment: Environment
    arch: Arch
    timings: Mapping[Problem, Mapping[str, list[float]]]
    layers: Mapping[tuple[Problem, str], LayerTimes] = field(default_factory=dict)

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
    layers: list[LayerTimes] = field(default_factory=list)


def save_recording(path: Path, recording: TimingRecording) -> None:
    """Write a recording to `path` atomically; raise `TuningError` on failure."""
    rows = [_Row(problem, dict(seconds)) for problem, seconds in recording.timings.items()]
    layers = list(recording.layers.values())
    value = _RecordedRows(recording.environment, recording.arch, rows, layers)
    RECORDING.write(path, RECORDING.encode(value))


def load_recording(path: Path) -> TimingRecording:
    """Return the recording in a file; raise `TuningError` if it is invalid."""
    result = RECORDING.load(path)
    timings = {row.problem: row.seconds for row in result.timings}
    return TimingRecording(result.environment, result.arch, timings, by_layer(result.layers))


def _check_row(row: _Row) -> str | None:
    return None if all(row.seconds.values()) else "a candidate has no timing"


RECORDING: Final = Schema(
    _RecordedRows,
    noun="recording",
    error=TuningError,
    remedy="record timings with `qsync tune --record FILE`",
    name="qsync recorded timings",
    largest=_LARGEST_FILE,
    checks={**_CHECKS, _Row: _check_row},
)
