"""What the page says of foreseen times of mixed plans is what the benchmark measured."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "replay_accuracy.json").read_text())["rows"]
WAYS = {
    "mapper": "foreseen",
    "mapper, uniform runs alone": "from uniform plans alone",
    "additive, no casts or cascades": "operators summed up, without casts and cascades",
    "floor: odd against even rounds": "odd and even rounds",
}


def table() -> list[str]:
    lines = ["| " + " | ".join(["model", "plans", "step", *WAYS.values()]) + " |", "| --- " * (3 + len(WAYS)) + "|"]
    for case in dict.fromkeys(row["case"] for row in ROWS):
        by_way = {row["way"]: row for row in ROWS if row["case"] == case}
        assert by_way.keys() >= WAYS.keys(), f"{case} lacks rows of {WAYS.keys() - by_way.keys()}"
        off = (f"{by_way[way]['passes_mean_%']:.1f}%, {by_way[way]['passes_worst_%']:.1f}%" for way in WAYS)
        foreseen = by_way["mapper"]
        lines.append("| " + " | ".join([case, str(foreseen["plans"]), f"{foreseen['step_ms']:.0f} ms", *off]) + " |")
    return lines


def test_the_page_tells_how_near_foreseen_plans_are_as_the_benchmark_measured_it() -> None:
    page = ROOT / "docs" / "predictor.md"
    text = page.read_text()
    told = re.search(r"(?<=<!-- how near plans -->\n\n).*?(?=\n*<!-- end -->)", text, flags=re.DOTALL)
    assert told is not None
    if os.environ.get("QSYNC_UPDATE_DOCS") == "1":
        page.write_text(text[: told.start()] + "\n".join(table()) + "\n" + text[told.end() :])
    else:
        assert told[0].splitlines() == table()
