"""Common parts of the GPU benchmarks: CUDA event timing, kernel calls, targets, incremental rows.

Invariant: the cases of a comparison run interleaved (support/harness.py), on random data, with a
cold GPU cache. Kernel times exclude the time in which Python enqueues calls. A case that fails is a
row with its error. `--device cpu` runs the same code as a dry run, without valid times.
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
    by_size,
    measure as measure_on_cpu,
    show,
    write_json,
)
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.problem.problem import ConvProduct, GemmProduct
from qsync_fx.backend.cuda.runtime.device_state import environment, known_of
from qsync_fx.backend.cuda.runtime.event_timer import call_of
from qsync_fx.backend.cuda.selection.select import dispatch_path

Call = Callable[[], object]

FLUSHED = 256 * 2**20
"""Bytes written before each call to flush the cache; the largest GPU cache has 60 MB (H200)."""

ROW_SECONDS = 0.02
CYCLES = 2.0e9
"""Upper bound of the clock rate in Hz, for `torch.cuda._sleep`, which counts cycles."""


@dataclass(frozen=True)
class Target:
    """Required value of a measurement."""

    text: str
    least: float | None = None
    most: float | None = None

    def columns(self, value: float | None) -> dict[str, Any]:
        """Return the columns "target" and "met"; "met" is None without a value."""
        met = None
        if value is not None:
            met = (self.least is None or value >= self.least) and (
                self.most is None or value <= self.most
            )
        return {"target": self.text, "met": met}


def inner_backend(device: torch.device) -> str:
    """Return Inductor for a GPU; a dry run on the CPU compiles no kernels."""
    return "aot_eager" if device.type == "cpu" else "inductor"


GATE = Target("never slower than BF16 (within 3 %)", least=0.97)


def read(
    description: str | None, argv: Sequence[str] | None = None, **more: dict[str, Any]
) -> argparse.Namespace:
    """Parse the arguments of all benchmarks, --device, --only and --seconds.

    Exit with status 1 if the requested GPU does not exist.
    """
    options = arguments(
        description,
        argv,
        device={"default": "cuda", "help": "cpu: a dry run (%(default)s)"},
        only={"default": "", "metavar": "TEXT", "help": "only cases whose name contains this"},
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
            raise SystemExit("no GPU, so no case was measured")
        options.device = torch.device("cuda", options.device.index or 0)
        torch.cuda.set_device(options.device)
    if options.quick:
        os.environ["QSYNC_BENCH_QUICK"] = "1"
    # Variants of one model compile the same code, which Dynamo counts as recompilations.
    torch._dynamo.config.recompile_limit = 64
    options.until = time.monotonic() + options.seconds
    return options


@dataclass
class Rows:
    """Rows of a benchmark; the file is written after each case."""

    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        dry = self.options.quick or self.options.device.type == "cpu"
        # A dry run neither meets nor misses a target.
        self.rows += [dict(row) | {"met": None} if dry and "met" in row else row for row in rows]
        if self.options.json:
            device = self.options.device
            where: dict[str, Any] = {"gpu": "none: a dry run on the CPU"}
            if device.type == "cuda":
                where = asdict(environment(device))
            write_json(self.options.json, self.rows, quick=self.options.quick, environment=where)

    def wanted(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the selected cases until the time is over; add a row for each that is left out."""
        chosen = [name for name in names if self.options.only in name]
        for index, name in enumerate(chosen):
            if time.monotonic() > self.options.until:
                self.add(
                    *(
                        {"case": left, "error": "left out: the time was over"}
                        for left in chosen[index:]
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
    """Time the cases interleaved.

    Returns:
        Seconds per call of each case, and the error of each case that failed.
    """
    running, failed = dict(cases), {}
    for name, case in cases.items():
        try:
            for _ in range(by_size(options.quick, 1, 3)):
                case()
            synchronize(options.device)
        # Each peer rejects a shape, dtype or device with its own exception.
        except Exception as error:  # noqa: BLE001
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            del running[name]
    rounds = by_size(options.quick, 3, rounds)
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
    """Return the median seconds of calls that are enqueued while the GPU sleeps for `wait` seconds.

    The GPU therefore never waits for Python.
    """
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
    """Return a row for each case that failed."""
    return [{"case": case, "name": name, "error": why} for name, why in failed.items()]


def best(problem: Problem, device: torch.device) -> tuple[KernelConfig, Problem] | None:
    """Return the fastest tuned kernel for a problem, and the problem in the form that it accepts.

    Return the first candidate if the problem is not tuned, and None if no kernel applies or the
    device supports none.
    """
    profile = known_of(device)
    if profile.arch is None:
        return None
    configuration = dispatch_path(problem, profile.arch)
    if isinstance(configuration, str):
        return None
    seconds: Mapping[str, float] = {}
    if profile.table is not None and (choice := profile.table.choice(problem)) is not None:
        seconds = choice.seconds
    by_time = sorted(
        configuration.configs, key=lambda config: seconds.get(config.name, float("inf"))
    )
    return by_time[0], configuration.problem


def tuned(problem: Problem, device: torch.device) -> bool:
    """Return whether the tuning table of this device has the problem's bucket."""
    table = known_of(device).table
    return table is not None and table.choice(problem) is not None


def by_kernel(
    problem: Problem, product: GemmProduct | ConvProduct, device: torch.device
) -> Call | None:
    """Return a call of the fastest kernel without dispatch; None if no kernel applies."""
    selected = best(problem, device)
    if selected is None:
        return None
    config, reason = selected
    return call_of(config, problem, reason, product)
