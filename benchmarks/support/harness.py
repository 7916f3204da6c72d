"""Common parts of the benchmark scripts: arguments, interleaved timing, result table, JSON file.

Invariant: the cases of one comparison run interleaved, so that load from other processes affects
all of them. A ratio is the median of the ratios of each round, not a ratio of medians. A row is one
case. The result file is replaced atomically.

    options = arguments(__doc__)
    times = measure({"ours": ours, "theirs": theirs}, repeats=5 if options.quick else 31)
    rows = [{"name": name, "seconds": times.median(name)} for name in times]
    finish(options, rows)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import qsync_fx
from qsync_fx import _C
from qsync_fx.devices.cpu_features import cpu
from qsync_fx.errors import QSyncError
from qsync_fx.serialization.atomic_files import check_writable, write_text

Row = Mapping[str, Any]
Case = TypeVar("Case")
Reduced = TypeVar("Reduced")
Full = TypeVar("Full")

_SHORTEST = 1e-3  # minimum seconds of a sample: a shorter call is repeated within it


@dataclass(frozen=True)
class Times:
    """Seconds per call of each case, one sample per round."""

    samples: Mapping[str, Sequence[float]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.samples)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def ratio(self, name: str, to: str) -> float:
        """Return the median over all rounds of the time of `name` divided by the time of `to`."""
        return statistics.median(
            a / b for a, b in zip(self.samples[name], self.samples[to], strict=True)
        )


def measure(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Time the cases in interleaved rounds; each round starts with the next case.

    `clock` returns seconds. `time.process_time` excludes the time of other processes on a core.
    """
    calls = {}
    for name, case in cases.items():
        for _ in range(warmup):
            case()
        calls[name] = max(1, round(_SHORTEST / max(_time(case, 1, clock), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_time(cases[name], calls[name], clock))
    return Times(samples)


def _time(case: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(calls):
        case()
    return (clock() - begin) / calls


def arguments(
    description: str | None, argv: Sequence[str] | None = None, **more: dict[str, Any]
) -> argparse.Namespace:
    """Parse --quick, --json PATH, --threads N and the options `more`, and set torch's threads.

    `more` maps option names to keywords of `add_argument`. The description in --help is the first
    paragraph of `description`.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases and repeats: a test run without valid measurements",
    )
    parser.add_argument("--json", type=to_write, metavar="PATH", help="write the rows there")
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="threads of torch (%(default)s)",
    )
    for name, keywords in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    return options


def by_size(quick: bool, reduced: Reduced, full: Full) -> Reduced | Full:
    """Return the value for a run with --quick, or the value for a full run."""
    return reduced if quick else full


def clock_for(threads: int) -> Callable[[], float]:
    """Return a clock: CPU time with one thread, which excludes other processes; else wall time."""
    return time.process_time if threads == 1 else time.perf_counter


def to_write(path: str | Path) -> Path:
    """Return `path` after creating its folder and checking that a file can be written there.

    As an argparse `type=` it reports an unusable path before the measurement starts.

    Raises:
        QSyncError: the folder cannot be created or the file cannot be written.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder cannot be made: {error.strerror or error}"
        raise QSyncError(problem, where=str(file.parent), do="give another path") from error
    check_writable(file)
    return file


def folder(path: str | Path) -> Path:
    """Return a writable folder, created if necessary; see `to_write`."""
    return to_write(Path(path) / "file").parent


def selected(options: argparse.Namespace, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the cases whose names start with the value of --only, or all without it."""
    only = (options.only or "").lower()
    return {name: case for name, case in cases.items() if name.lower().startswith(only)}


def finish(options: argparse.Namespace, rows: Sequence[Row], by: str | None = None) -> None:
    """Print the rows as a table and write them to the file of `--json`.

    With `by`, such as "case", rows with other values of this column stay in the file.
    """
    show(rows)
    if options.json:
        if by is None:
            write_json(options.json, rows, quick=options.quick)
        else:
            write_cases(options.json, rows, quick=options.quick, by=by)
        print(f"written: {options.json}")


def write_cases(path: Path, rows: Sequence[Row], quick: bool = False, by: str = "case") -> None:
    """Write rows as `write_json` does, but retain the file's rows with other values of `by`."""
    done = {row[by] for row in rows}
    others = [row for row in standing(path, quick) if row[by] not in done]
    write_json(path, [*others, *rows], quick=quick)


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table; rows may have different keys."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def write_json(path: Path, rows: Sequence[Row], quick: bool = False, **more: Any) -> None:
    """Write the rows, the machine, the versions and the keys `more` to the file at `path`.

    Earlier rows of the same machine are replaced; runs of other machines stay under "others".
    """
    content = {
        "machine": {**_this_machine(), "kernels": _C.isa(), "load": os.getloadavg()[0]},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "qsync_fx": qsync_fx.__version__,
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        **more,
        "rows": list(rows),
    }
    others = [run for run in _runs(path) if _machine(run) != _machine(content)]
    if others:
        content["others"] = others
    write_text(to_write(path), json.dumps(content, indent=1, allow_nan=False) + "\n")


def standing(path: Path, quick: bool = False, all_machines: bool = False) -> list[dict[str, Any]]:
    """Return the file's rows of this machine, each with its date.

    With `all_machines`, rows of other machines follow, and each row has the kernels of its machine.
    """
    machine = _machine({"machine": _this_machine(), "quick": quick})
    result = []
    for run in _runs(path):
        metadata = {"date": run["date"][:10]}
        if all_machines:
            metadata["kernels"] = run["machine"]["kernels"]
        if _machine(run) == machine or (all_machines and run["quick"] == quick):
            result += [{**metadata, **row} for row in run["rows"]]
    return result


def _this_machine() -> dict[str, Any]:
    """Return the description of this machine."""
    processor = cpu()
    return {
        "cpu": processor.model,
        "cores": processor.cores,
        "threads": torch.get_num_threads(),
        "isa": list(processor.features),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a result file, one per machine."""
    if not path.exists():
        return []
    runs: dict[str, Any] = json.loads(path.read_text())
    others = runs.pop("others", [])
    return [runs, *others] if "machine" in runs else others


def _machine(run: dict[str, Any]) -> tuple[object, ...]:
    """Return the key of comparable runs: machine, threads, ISA, and whether --quick was set."""
    machine = run["machine"]
    return (
        run["quick"],
        machine["threads"],
        tuple(machine["isa"]),
        *(machine[name] for name in ("cpu", "cores", "cuda")),
    )
