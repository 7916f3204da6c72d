"""Plot of a Pareto front, seconds per step against variance, as SVG or HTML.

The file is self-contained. Each point has a title with its values.
"""

from __future__ import annotations

import html
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.analysis import ParetoFront, front_table
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.errors import OptionError
from qsync_fx.formatting import duration, round_step
from qsync_fx.serialization import Path
from qsync_fx.serialization.atomic_files import write_text
from qsync_fx.text_tables import plain

_WIDE, _HIGH = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 28, 60
_TICKS: Final = 5
_AIR: Final = 0.05
"""Margin on each side of an axis, relative to the range of the points."""
_STYLE: Final = """\
text { font: 13px system-ui, sans-serif; fill: #222 }
.grid { stroke: #ddd }
.front { fill: none; stroke: #1b6ca8; stroke-width: 2 }
.point { fill: #1b6ca8 }
.uniform { fill: #b5651d }
.chosen { fill: none; stroke: #b00020; stroke-width: 2 }
.beside { fill: #b5651d }
.own { fill: #b00020 }"""


@dataclass(frozen=True)
class _Axis:
    """Axis from values to pixels.

    Attributes:
        ticks: labelled values and their labels.
        low, high: ends of the axis, after `scale`.
        begin, end: ends of the axis in pixels.
        scale: transform under which the axis is linear.
    """

    ticks: Sequence[tuple[float, str]]
    low: float
    high: float
    begin: float
    end: float
    scale: Callable[[float], float] = float

    def at(self, value: float) -> float:
        return self.begin + (self.scale(value) - self.low) / (self.high - self.low) * (
            self.end - self.begin
        )


def save_front(front: ParetoFront, path: Path) -> None:
    """Write the plot to an SVG or HTML file, by its suffix; raise `QSyncError` on failure."""
    kind = check_picture(path)
    write_text(pathlib.Path(path), front_svg(front) if kind == ".svg" else _page(front))


def check_picture(path: Path) -> str:
    """Return the suffix of a plot file, ".svg" or ".html"; raise `OptionError` for others."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in (".svg", ".html"):
        message = f"no picture is called {os.fspath(path)!r}"
        raise OptionError(message, where="the file", do="name it FILE.svg or FILE.html")
    return suffix


def front_svg(front: ParetoFront) -> str:
    """Return the plot as SVG text."""
    answers = [*front.points, *front.uniform.values(), *([front.chosen] if front.chosen else [])]
    across = _seconds([answer.evaluation.seconds for answer in answers])
    up = _variances([answer.evaluation.variance for answer in answers])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="white"/>',
        *_grid(across, up),
        _line(front.points, across, up),
    ]
    parts += [
        _dot(answer, across, up, "point", f"{index + 1}")
        for index, answer in enumerate(front.points)
    ]
    for fmt, answer in front.uniform.items():
        parts += [
            _square(answer, across, up, f"uniform {fmt}"),
            _label(answer, across, up, fmt, "beside"),
        ]
    if front.chosen is not None:
        x, y = _place(front.chosen, across, up)
        parts.append(
            f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="9">{_title("chosen", front.chosen)}</circle>'
        )
        parts.append(_label(front.chosen, across, up, "chosen", "own", below=True))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _page(front: ParetoFront) -> str:
    table = html.escape(plain(front_table(front)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>seconds against variance</title></head>\n'
        f"<body>\n{front_svg(front)}<pre>{table}</pre>\n</body>\n</html>\n"
    )


def _seconds(values: Sequence[float]) -> _Axis:
    low, high = _ends(min(values), max(values))
    step = round_step((high - low) / _TICKS)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return _Axis([(value, duration(value)) for value in ticks], low, high, _LEFT, _WIDE - _RIGHT)


def _variances(values: Sequence[float]) -> _Axis:
    """Return a log10 axis; zero is drawn one decade below the smallest positive value."""
    above = [value for value in values if value > 0] or [1.0]
    least = min(above) / 10 if 0.0 in values else min(above)

    def scale(value: float) -> float:
        return math.log10(max(value, least))

    low, high = _ends(scale(min(values)), scale(max(values)))
    every = max(1, math.ceil((high - low) / _TICKS))
    powers = range(math.ceil(scale(min(above))), math.floor(high) + 1, every)
    zero = [(0.0, "0")] if 0.0 in values else []
    return _Axis(
        [*zero, *((10.0**index, f"1e{index}") for index in powers)],
        low,
        high,
        _HIGH - _BOTTOM,
        _TOP,
        scale,
    )


def _ends(low: float, high: float) -> tuple[float, float]:
    air = (high - low) * _AIR or abs(high) * _AIR or 1.0
    return low - air, high + air


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for value, text in across.ticks:
        x = across.at(value)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HIGH - _BOTTOM}"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{_HIGH - _BOTTOM + 18}" text-anchor="middle">{text}</text>'
        )
    for value, text in up.ticks:
        y = up.at(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (_LEFT + _WIDE - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HIGH - 16}" text-anchor="middle">seconds of a step</text>'
    )
    return [
        *parts,
        f'<text x="{_LEFT}" y="18" text-anchor="start">variance of the mean gradient</text>',
    ]


def _line(points: Sequence[PlanResult], across: _Axis, up: _Axis) -> str:
    places = " ".join(
        f"{x:.1f},{y:.1f}" for x, y in (_place(answer, across, up) for answer in points)
    )
    return f'<polyline class="front" points="{places}"/>'


def _dot(answer: PlanResult, across: _Axis, up: _Axis, kind: str, name: str) -> str:
    x, y = _place(answer, across, up)
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4">{_title(name, answer)}</circle>'


def _square(answer: PlanResult, across: _Axis, up: _Axis, name: str) -> str:
    x, y = _place(answer, across, up)
    return f'<rect class="uniform" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{_title(name, answer)}</rect>'


def _label(
    answer: PlanResult, across: _Axis, up: _Axis, text: str, kind: str, below: bool = False
) -> str:
    x, y = _place(answer, across, up)
    # Points near the right edge have their label on the left.
    side, anchor = (-10, "end") if x > _WIDE - _RIGHT - 80 else (10, "start")
    return f'<text class="{kind}" x="{x + side:.1f}" y="{y + (20 if below else -8):.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _place(answer: PlanResult, across: _Axis, up: _Axis) -> tuple[float, float]:
    return across.at(answer.evaluation.seconds), up.at(answer.evaluation.variance)


def _title(name: str, answer: PlanResult) -> str:
    text = f"{name}: {duration(answer.evaluation.seconds)} a step, variance {answer.evaluation.variance:.4g}"
    return f"<title>{html.escape(text)}</title>"
