"""What every benchmark shares: arguments, interleaved timing, a table, a JSON file.

Invariant: the cases of one comparison take turns, so that whatever else the machine does falls on all of them; a ratio is the median of
the ratios within a turn, not a ratio of two medians. One row a case; the file is replaced whole or left alone.

    options = arguments(__doc__)
    times = measure({"ours": ours, "theirs": theirs}, repeats=5 if options.quick else 31)
    rows = [{"case": "1536x768", "name": name, "seconds": times.median(name), "to_theirs": times.ratio(name, "theirs")} for name in times]
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

_SHORTEST = 1e-3  # seconds a sample lasts at the least: calls are repeated within it


@dataclass(frozen=True)
class Times:
    """Seconds a call, by case, one sample a turn."""

    samples: Mapping[str, Sequence[float]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.samples)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def ratio(self, name: str, to: str) -> float:
        """Returns the median over all turns of the time of `name` divided by that of `to`."""
        return statistics.median(
            a / b for a, b in zip(self.samples[name], self.samples[to], strict=True)
        )


def measure(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Times the cases in turns, each turn beginning with another case; `time.process_time` leaves out what else runs on a core."""
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
    """Reads --quick, --json PATH and --threads N, which it sets; `more` are further options with argparse's keywords."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases and repeats: shows that it works, measures nothing",
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


def to_write(path: str | Path) -> Path:
    """Returns a path that a file can be written to, and makes its folder; for `type=`, so that it is known before anything is measured.

    Raises:
        QSyncError: no file can be written there.
    """
    found = Path(path)
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder cannot be made: {error.strerror or error}"
        raise QSyncError(what, where=str(found.parent), do="give another path") from error
    check_writable(found)
    return found


def folder(path: str | Path) -> Path:
    """Returns a folder that files can be written to, which it makes; see `to_write`."""
    return to_write(Path(path) / "file").parent


def selected(options: argparse.Namespace, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Returns the cases whose names begin with what --only says; all where it says nothing."""
    only = (options.only or "").lower()
    return {name: case for name, case in cases.items() if name.lower().startswith(only)}


def finish(
    options: argparse.Namespace, rows: Sequence[Row], cases: bool = False, note: str | None = None
) -> None:
    """Print the rows as a table and write them to the file of `--json`.

    With `cases`, rows of other cases stay in the file. A note is printed and written with the rows.
    """
    show(rows)
    more = {} if note is None else {"note": note}
    if note is not None:
        print(note)
    if options.json:
        (write_cases if cases else write_json)(options.json, rows, quick=options.quick, **more)
        print(f"written: {options.json}")


def write_cases(path: Path, rows: Sequence[Row], quick: bool = False, **more: Any) -> None:
    """Write rows as `write_json` does; rows of other cases stay in the file."""
    done = {row["case"] for row in rows}
    others = [row for row in standing(path, quick) if row["case"] not in done]
    write_json(path, [*others, *rows], quick=quick, **more)


def show(rows: Sequence[Row]) -> None:
    """Prints rows, whose keys may differ, as a table."""
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
    """Writes the rows and what they were measured on to the file at `path`; `more` is what else it is to say of that.

    Rows of the same machine that stand there are replaced, those of other machines are kept under "others".
    """
    content = {
        "machine": {**_here(), "kernels": _C.isa(), "load": os.getloadavg()[0]},
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
    content |= {"others": others} if others else {}
    write_text(to_write(path), json.dumps(content, indent=1, allow_nan=False) + "\n")


def standing(path: Path, quick: bool = False) -> list[dict[str, Any]]:
    """Returns the rows that a file has of this machine, each with the day it is of, for a script that takes some of them anew."""
    here = _machine({"machine": _here(), "quick": quick})
    runs = (run for run in _runs(path) if _machine(run) == here)
    return [{"date": run["date"][:10], **row} for run in runs for row in run["rows"]]


def _here() -> dict[str, Any]:
    """Returns what this process runs on."""
    processor = cpu()
    return {
        "cpu": processor.model,
        "cores": processor.cores,
        "threads": torch.get_num_threads(),
        "isa": list(processor.features),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _runs(path: Path) -> list[dict[str, Any]]:
    """Returns what a file of results holds, machine by machine."""
    if not path.exists():
        return []
    found: dict[str, Any] = json.loads(path.read_text())
    others = found.pop("others", [])
    return [found, *others] if "machine" in found else others


def _machine(run: dict[str, Any]) -> tuple[object, ...]:
    """What makes runs comparable: what they ran on, and whether they measured or only showed that they work."""
    machine = run["machine"]
    return (
        run["quick"],
        machine["threads"],
        tuple(machine["isa"]),
        *(machine[name] for name in ("cpu", "cores", "cuda")),
    )
