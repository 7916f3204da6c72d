"""What the page and the issue say of the methods is what the benchmark found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

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
    told = re.search(r"(?<=<!-- how well -->\n\n).*?(?=\n*<!-- end -->)", text, flags=re.DOTALL)
    assert told is not None
    if os.environ.get("QSYNC_UPDATE_DOCS") == "1":
        page.write_text(text[: told.start()] + "\n".join(lines[1:]) + "\n" + text[told.end() :])
    else:
        assert told[0].splitlines() == lines[1:]


def test_picture_equals_the_indicator_benchmark(tmp_path: Path) -> None:
    drawn = tmp_path / "indicators.svg"
    script, rows = (
        ROOT / "benchmarks" / "predictor" / "indicator_scatter.py",
        ROOT / "benchmarks" / "results" / "sensitivity.json",
    )
    command = [sys.executable, str(script), "--json", str(rows), "--picture", str(drawn)]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert drawn.read_text() == (ROOT / "docs" / "indicators.svg").read_text()
    points = ElementTree.fromstring(drawn.read_text()).findall(
        ".//{http://www.w3.org/2000/svg}circle"
    )
    assert len(points) <= 3 * sum(row["operators"] for row in ROWS) and len(points) > 2 * sum(
        row["operators"] for row in ROWS
    )
