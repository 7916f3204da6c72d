"""Scatter plot of estimated variances against Monte Carlo, from the rows of sensitivity.py.
Each panel is an indicator, each point an operator in one format. A point on the diagonal is exact.
Both axes have the same logarithmic range in all panels.
"""

from __future__ import annotations

import html
import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.curves import COLORS

TRUTH, METHODS = "monte_carlo", ("second_order", "injected", "paper")
SIDE, LEFT, TOP, BOTTOM, GAP = 250, 62, 34, 44, 18
TICKS = 4

Point = tuple[float, float]


def points(rows: Sequence[Mapping[str, Any]], method: str) -> dict[str, list[Point]]:
    """Return log10 of (Monte Carlo, estimate) of each operator by format, without zeros."""
    result: dict[str, list[Point]] = {}
    for row in rows:
        if (each := row.get("each")) is None:
            continue
        for real, predicted in zip(each[TRUTH], each[method], strict=True):
            if real and predicted:
                result.setdefault(row["precision"], []).append(
                    (math.log10(real), math.log10(predicted))
                )
    return result


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the panels as an SVG document."""
    points_by_method = {method: points(rows, method) for method in METHODS}
    every = [
        value
        for by in points_by_method.values()
        for many in by.values()
        for point in many
        for value in point
    ]
    low, high = math.floor(min(every)), math.ceil(max(every))
    wide, tall = LEFT + len(METHODS) * (SIDE + GAP), TOP + SIDE + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" '
        f'height="{tall}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>What indicators say of operators against Monte Carlo</title>",
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text transform="translate(14 {TOP + SIDE / 2}) rotate(-90)" '
        'text-anchor="middle">variance, as said</text>',
    ]
    for index, (method, by) in enumerate(points_by_method.items()):
        parts += [
            f'<g transform="translate({LEFT + index * (SIDE + GAP)} {TOP})">',
            *_panel(method, by, low, high, index == 0),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    method: str, by: Mapping[str, Sequence[Point]], low: int, high: int, first: bool
) -> Iterator[str]:
    def place(value: float) -> float:
        return SIDE * (value - low) / (high - low)

    yield f'<text x="0" y="-12" font-weight="bold">{html.escape(method)}</text>'
    yield f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#ddd"/>'
    yield f'<line x1="0" y1="{SIDE}" x2="{SIDE}" y2="0" stroke="#bbb"/>'
    step = max(1, math.ceil((high - low) / TICKS))
    for power in range(low, high + 1, step):
        yield f'<text x="{place(power):.1f}" y="{SIDE + 16}" text-anchor="middle">1e{power}</text>'
        if first:
            yield (
                f'<text x="-6" y="{SIDE - place(power) + 4:.1f}" text-anchor="end">1e{power}</text>'
            )
    yield f'<text x="{SIDE / 2}" y="{SIDE + 36}" text-anchor="middle">variance, Monte Carlo</text>'
    for index, (fmt, many) in enumerate(sorted(by.items())):
        color = COLORS[index]
        yield f'<text x="8" y="{16 + 16 * index}" fill="{color}">{html.escape(fmt)}</text>'
        for real, predicted in many:
            yield (
                f'<circle cx="{place(real):.1f}" cy="{SIDE - place(predicted):.1f}" r="2.4" '
                f'fill="{color}" fill-opacity="0.6"/>'
            )


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="what sensitivity.py has written")
    parser.add_argument("--picture", type=Path, required=True, help="the file to write, of SVG")
    options = parser.parse_args()
    options.picture.write_text(picture(json.loads(options.json.read_text())["rows"]))


if __name__ == "__main__":
    main()
