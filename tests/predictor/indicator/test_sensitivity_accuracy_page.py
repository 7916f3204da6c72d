"""Accuracy of the sensitivity methods: results of the benchmark, its page and its chart."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots

ROOT = Path(__file__).resolve().parents[3]
COLUMNS = ("operators", "floor", "second_order", "injected", "depth", "paper")
ROWS: list[dict[str, Any]] = [
    row
    for row in json.loads((ROOT / "benchmarks" / "results" / "sensitivity.json").read_text())[
        "rows"
    ]
    if "floor" in row
]


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_methods_correlate_with_real_quantized_passes(precision: str) -> None:
    rows = [row for row in ROWS if row["precision"] == precision]
    assert len(rows) == 12
    for row in rows:
        assert row["second_order"] >= 0.9 and row["injected"] >= 0.95, row


def test_page_equals_the_indicator_benchmark() -> None:
    lines: list[str] = []
    for precision in ("int8", "bf16"):
        lines += [
            "",
            f"| {precision.upper()} | {' | '.join(COLUMNS)} |",
            "|" + "---|" * (len(COLUMNS) + 1),
        ]
        for row in ROWS:
            if row["precision"] == precision:
                cells = [
                    f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name])
                    for name in COLUMNS
                ]
                lines.append(f"| {' | '.join([row['case'], *cells])} |")
    page = ROOT / "docs" / "sensitivity.md"
    text = page.read_text()
    match = re.search(r"(?<=<!-- how well -->\n\n).*?(?=\n*<!-- end -->)", text, flags=re.DOTALL)
    assert match is not None
    if os.environ.get("QSYNC_UPDATE_DOCS") == "1":
        page.write_text(text[: match.start()] + "\n".join(lines[1:]) + "\n" + text[match.end() :])
    else:
        assert match[0].splitlines() == lines[1:]


def test_indicator_chart_has_a_point_per_operator() -> None:
    panels = plots.indicators().axes
    assert [axes.get_title("left") for axes in panels] == ["second_order", "injected", "paper"]
    operators = sum(row["operators"] for row in ROWS)
    for axes in panels:
        points = [point for marks in axes.collections for point in marks.get_offsets()]
        assert 2 / 3 * operators < len(points) <= operators
