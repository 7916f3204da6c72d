"""Line charts as SVG, with panels below each other.

Invariant: a series has the same color in all panels; each panel has its own axes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

Series = Mapping[str, Sequence[tuple[float, float]]]

COLORS = (
    "#1b4f8a",
    "#d95f02",
    "#59a14f",
    "#b07aa1",
    "#e7298a",
    "#9d755d",
    "#66a61e",
    "#17becf",
    "#555555",
)
WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 760, 270, 64, 130, 34, 44
TICKS = 5


def picture(panels: Mapping[str, Series], across: str, up: str) -> str:
    """Return an SVG of `panels` (title to series); `across` and `up` label the axes."""
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    high = HIGH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" width="{WIDE}" '
        f'height="{high}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDE}" height="{high}" fill="white"/>',
    ]
    for index, (title, series) in enumerate(panels.items()):
        parts += [
            f'<g transform="translate(0 {index * HIGH})">',
            *_panel(title, series, colors, across, up),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str, series: Series, colors: Mapping[str, str], across: str, up: str
) -> Iterator[str]:
    points = [point for line in series.values() for point in line]
    x_ticks, y_ticks = (ticks([point[axis] for point in points]) for axis in (0, 1))
    yield f'<text x="{LEFT}" y="18" font-weight="bold">{html.escape(title)}</text>'
    yield (
        f'<text x="{(LEFT + WIDE - RIGHT) / 2}" y="{HIGH - 8}" '
        f'text-anchor="middle">{html.escape(across)}</text>'
    )
    middle = (TOP + HIGH - BOTTOM) / 2
    yield (
        f'<text transform="translate(14 {middle}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(up)}</text>'
    )

    def x(value: float) -> float:
        return LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDE - RIGHT - LEFT)

    def y(value: float) -> float:
        return (
            HIGH
            - BOTTOM
            - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HIGH - BOTTOM - TOP)
        )

    for value in x_ticks:
        yield (
            f'<text x="{x(value):.1f}" y="{HIGH - BOTTOM + 16}" '
            f'text-anchor="middle">{value:g}</text>'
        )
    for value in y_ticks:
        yield (
            f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#ddd"/>'
        )
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for row, (name, line) in enumerate(series.items()):
        places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        title_element = f"<title>{html.escape(name)}</title>"
        yield (
            f'<polyline points="{places}" fill="none" stroke="{colors[name]}" '
            f'stroke-width="1.6">{title_element}</polyline>'
        )
        yield (
            f'<text x="{WIDE - RIGHT + 10}" y="{TOP + 12 + 17 * row}" '
            f'fill="{colors[name]}">{html.escape(name)}</text>'
        )


def ticks(values: Sequence[float]) -> list[float]:
    """Return equidistant round numbers; the first and last enclose all values."""
    low, high = min(values), max(values)
    step = round_step((high - low) / TICKS or abs(high) or 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def round_step(least: float) -> float:
    """Return a tick distance: the smallest of 1, 2 or 5 times a power of ten from `least` > 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))
