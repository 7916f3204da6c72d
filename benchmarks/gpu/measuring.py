"""What the benchmarks on a GPU share: timing by CUDA events, kernels of ours by themselves, targets, rows that are kept as they come.

Invariant: the cases of a comparison take turns (`support.harness`), on random data, and find nothing of it in the GPU's cache; the
time that Python takes to queue a call is not part of a kernel's. A case that does not run here is a row that says why. With `--device cpu`
the same code runs without a GPU, which shows that it works and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from benchmarks.support.harness import (
    Row,
    Times,
    arguments,
    measure as measure_on_cpu,
    show,
    write_json,
)
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.runtime.device_state import environment, known_of
from qsync_fx.backend.cuda.runtime.event_timer import TimedOperands, call_of
from qsync_fx.backend.cuda.selection.select import known, way

Call = Callable[[], object]

FLUSHED = 256 * 2**20
"""Bytes that are written before each call: more than the largest cache of a GPU (60 MB on an H200)."""

ROW_SECONDS = 0.02
CYCLES = 2.0e9
"""Clock cycles a second, at most: what `torch.cuda._sleep` is told waits at least as long as it should."""


@dataclass(frozen=True)
class Target:
    """What a number should reach, as the issue that ordered it says."""

    text: str
    least: float | None = None
    most: float | None = None

    def judged(self, value: float | None) -> dict[str, Any]:
        """Returns the columns of a row: the target, and whether a value meets it; None where it was not measured."""
        met = None
        if value is not None:
            met = (self.least is None or value >= self.least) and (
                self.most is None or value <= self.most
            )
        return {"target": self.text, "met": met}


GATE = Target("never slower than BF16 (within 3 %)", least=0.97)


def read(
    description: str | None, argv: Sequence[str] | None = None, **more: dict[str, Any]
) -> argparse.Namespace:
    """Reads the arguments of all benchmarks, --device, --only and --seconds.

    Exits with status 1 where there is no such GPU: what is asked for cannot be measured.
    """
    options = arguments(
        description,
        argv,
        device={"default": "cuda", "help": "cpu: a dry run (%(default)s)"},
        only={"default": "", "metavar": "TEXT", "help": "only cases whose name holds this"},
        seconds={
            "type": float,
            "default": 420.0,
            "help": "start no further case after that (%(default)s)",
        },
        **more,
    )
    options.device = torch.device(options.device)
    if options.device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("no GPU: nothing was measured")
        options.device = torch.device("cuda", options.device.index or 0)
        torch.cuda.set_device(options.device)
    if options.quick:
        os.environ["QSYNC_BENCH_QUICK"] = "1"
    # Variants of one model are compiled from the same code, which counts as compiling it anew.
    torch._dynamo.config.recompile_limit = 64
    options.until = time.monotonic() + options.seconds
    return options


@dataclass
class Rows:
    """The rows of a benchmark; the file is written anew with each case, so that what was measured is kept whatever comes."""

    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        dry = self.options.quick or self.options.device.type == "cpu"
        # A dry run meets and misses nothing.
        self.rows += [dict(row) | {"met": None} if dry and "met" in row else row for row in rows]
        if self.options.json:
            device = self.options.device
            where = (
                asdict(environment(device))
                if device.type == "cuda"
                else {"gpu": "none: a dry run on the CPU"}
            )
            write_json(self.options.json, self.rows, quick=self.options.quick, environment=where)

    def wanted(self, names: Sequence[str]) -> Iterator[str]:
        """Yields the names of cases to be measured, as long as there is time; says which are left out."""
        chosen = [name for name in names if self.options.only in name]
        for at, name in enumerate(chosen):
            if time.monotonic() > self.options.until:
                self.add(
                    *(
                        {"case": left, "error": "left out: the time was over"}
                        for left in chosen[at:]
                    )
                )
                return
            print(name, flush=True)
            yield name

    def finish(self) -> None:
        show(self.rows)
        if self.options.json:
            self.add()
            print(f"written: {self.options.json}")


def measure(
    cases: Mapping[str, Call], options: argparse.Namespace, rounds: int = 11
) -> tuple[Times, dict[str, str]]:
    """Times the cases in turns.

    Returns:
        Seconds a call, by case; and why the cases that did not run did not.
    """
    running, failed = dict(cases), {}
    for name, case in cases.items():
        try:
            for _ in range(1 if options.quick else 3):
                case()
            synchronize(options.device)
        except Exception as error:  # noqa: BLE001  a peer may refuse a shape, a type, a device, each in its own way
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            del running[name]
    rounds = 3 if options.quick else rounds
    if options.device.type == "cpu":
        return measure_on_cpu(running, rounds, warmup=1), failed
    return _measure_on_gpu(running, rounds), failed


def _measure_on_gpu(cases: Mapping[str, Call], rounds: int) -> Times:
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    waits, calls = {}, {}
    for name, case in cases.items():
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(3):
            case()
        queued = (time.perf_counter() - since) / 3
        took = _row(case, 3, flush, 0.01)
        calls[name] = max(3, min(30, round(ROW_SECONDS / max(took, 1e-6))))
        waits[name] = min(0.05, 1.5 * queued * calls[name])
    samples: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            samples[name].append(_row(cases[name], calls[name], flush, waits[name]))
    return Times(samples)


def _row(case: Call, calls: int, flush: Tensor, wait: float) -> float:
    """Returns the median seconds of some calls that are queued while the GPU waits, so that none of them waits for Python."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(int(wait * CYCLES))  # type: ignore[no-untyped-call]
    for start, end in pairs:
        flush.fill_(1)
        start.record()
        case()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def errors(case: str, failed: Mapping[str, str]) -> list[Row]:
    """Returns a row for each case that did not run."""
    return [{"case": case, "name": name, "error": why} for name, why in failed.items()]


def best(problem: Problem, device: torch.device) -> tuple[KernelConfig, Problem] | None:
    """Returns the fastest of our kernels for a problem, by what was tuned, and the problem as it takes it.

    Untuned it is the first candidate; None where no kernel takes the problem, or the device has none.
    """
    found = known_of(device)
    if found.arch is None:
        return None
    how = way(problem, found.arch, known)
    if isinstance(how, str):
        return None
    choice = found.table.choice(problem) if found.table is not None else None
    seconds = {} if choice is None else choice.seconds
    by_time = sorted(how.configs, key=lambda config: seconds.get(config.name, float("inf")))
    return by_time[0], how.taken


def tuned(problem: Problem, device: torch.device) -> bool:
    """Whether a problem's bucket was measured on this device."""
    table = known_of(device).table
    return table is not None and table.choice(problem) is not None


def by_kernel(problem: Problem, given: TimedOperands, device: torch.device) -> Call | None:
    """Returns a call of the fastest of our kernels on some operands, without what decides and checks; None where there is none."""
    found = best(problem, device)
    if found is None:
        return None
    config, taken = found
    return call_of(config, problem, taken, given)
