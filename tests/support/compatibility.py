"""Test results by version of Python and torch: tests/compatibility.json, and its table.

`make test-torch VERSION=...` runs all fast tests with `--junitxml`, and this script records the
report. A new row replaces the previous one of the same versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.pages import markdown

RESULTS = Path(__file__).resolve().parents[1] / "compatibility.json"


def table() -> str:
    """Return the table of docs/install.md."""
    rows = (
        (
            row["python"],
            row["torch"],
            str(row["passed"]),
            str(len(row["failed"])),
            str(row["skipped"]),
            f"{row['date']}, {row['kernels']} kernels",
        )
        for row in json.loads(RESULTS.read_text())
    )
    return markdown(("Python", "torch", "passed", "failed", "skipped", "tested"), rows)


def row_of(report: Path) -> dict[str, Any]:
    """Return the row of a test run from its JUnit report.

    Raises:
        ValueError: the report contains no passed test, so the run is incomplete.
    """
    import torch

    from qsync_fx import _C

    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    if passed <= 0:
        raise ValueError(f"{report} contains no passed test")
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "passed": passed,
        "failed": sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed}),
        "skipped": len(skipped),
        "kernels": _C.isa(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def record(row: dict[str, Any]) -> None:
    """Write the row, which replaces a row of the same versions."""
    from qsync_fx.serialization.atomic_files import write_text

    def versions(row: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(int, row[name].split("."))) for name in ("torch", "python"))

    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [other for other in rows if versions(other) != versions(row)]
    rows = sorted([*rows, row], key=versions)
    write_text(RESULTS, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, help="JUnit report of a run of all fast tests")
    record(row_of(parser.parse_args().report))
