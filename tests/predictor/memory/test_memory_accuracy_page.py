"""Predicted peaks on the memory page, compared with the results of the benchmark."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
UNIFORM = {"fp32", "bf16", "int8"}
ROWS: list[dict[str, Any]] = [
    row
    for row in json.loads((ROOT / "benchmarks" / "results" / "memory_accuracy.json").read_text())[
        "rows"
    ]
    if "at" in row and row["of"] == "passes" and row["plan"] not in UNIFORM
]


def off(rows: list[dict[str, Any]], key: str) -> str:
    errors = [abs(row[key]) for row in rows]
    return f"{statistics.mean(errors):.1f} / {max(errors):.1f}"


def table() -> list[str]:
    lines = [
        "| model | plans | peaks, MB | error, % | of all that is held, % |",
        "|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in ROWS):
        rows = [row for row in ROWS if row["case"] == case]
        peaks = [row["real_mb"] for row in rows]
        cells = case, str(len(rows)), f"{min(peaks):.0f} to {max(peaks):.0f}"
        lines.append(f"| {' | '.join([*cells, off(rows, 'error'), off(rows, 'whole_error')])} |")
    return lines


def test_page_equals_the_memory_benchmark() -> None:
    page = ROOT / "docs" / "memory.md"
    text = page.read_text()
    match = re.search(r"(?<=<!-- how near -->\n\n).*?(?=\n*<!-- end -->)", text, flags=re.DOTALL)
    assert match is not None
    if os.environ.get("QSYNC_UPDATE_DOCS") == "1":
        page.write_text(text[: match.start()] + "\n".join(table()) + "\n" + text[match.end() :])
    else:
        assert match[0].splitlines() == table()
