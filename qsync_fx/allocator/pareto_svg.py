"""Plot of a Pareto front, seconds per step against variance, as SVG or HTML."""

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
.offset { fill: #b5651d }
.own { fill: #b00020 }"""


@dataclass(frozen=True)
class _Axis:
    """Axis from values to pixels, linear after `scale`; `ticks` are values and their labels."""

    ticks: Sequence[tuple[float, str]]
    low: float
    high: float
    begin: float
    end: float
    scale: Callable[[float], float] = float

    def at(self, value: float) -> float:
        share = (self.scale(value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


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
    """Return the plot as SVG text; each point has a title with its values."""
    chosen = [front.chosen] if front.chosen is not None else []
    answers = [*front.points, *front.uniform.values(), *chosen]
    across = _seconds([answer.evaluation.seconds for answer in answers])
    up = _variances([answer.evaluation.variance for answer in answers])

    def place(answer: PlanResult) -> tuple[float, float]:
        return across.at(answer.evaluation.seconds), up.at(answer.evaluation.variance)

    size = f'width="{_WIDE}" height="{_HIGH}"'
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, front.points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" {size}>',
        f"<style>{_STYLE}</style>",
        f'<rect {size} fill="white"/>',
        *_grid(across, up),
        f'<polyline class="front" points="{line}"/>',
    ]
    for index, answer in enumerate(front.points, 1):
        parts.append(_circle("point", place(answer), 4, _title(f"{index}", answer)))
    for fmt, answer in front.uniform.items():
        (x, y), title = place(answer), _title(f"uniform {fmt}", answer)
        square = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
        parts.append(f'<rect class="uniform" {square}>{title}</rect>')
        parts.append(_label("offset", (x, y - 8), fmt))
    for answer in chosen:
        x, y = place(answer)
        parts.append(_circle("chosen", (x, y), 9, _title("chosen", answer)))
        parts.append(_label("own", (x, y + 20), "chosen"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _page(front: ParetoFront) -> str:
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>seconds against variance</title></head>
<body>
{front_svg(front)}<pre>{html.escape(plain(front_table(front)))}</pre>
</body>
</html>
"""


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
    ticks = [(10.0**index, f"1e{index}") for index in powers]
    if 0.0 in values:
        ticks.insert(0, (0.0, "0"))
    return _Axis(ticks, low, high, _HIGH - _BOTTOM, _TOP, scale)


def _ends(low: float, high: float) -> tuple[float, float]:
    air = (high - low) * _AIR or abs(high) * _AIR or 1.0
    return low - air, high + air


def _grid(across: _Axis, up: _Axis) -> list[str]:
    """Return the lines and labels of both axes, and their titles."""
    bottom, parts = _HIGH - _BOTTOM, []
    for value, text in across.ticks:
        x = f"{across.at(value):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 18, "middle", text))
    for value, text in up.ticks:
        y = up.at(value)
        ends = f'x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(_text(_LEFT - 8, f"{y + 4:.1f}", "end", text))
    middle = (_LEFT + _WIDE - _RIGHT) / 2
    parts.append(_text(middle, _HIGH - 16, "middle", "seconds of a step"))
    parts.append(_text(_LEFT, 18, "start", "variance of the mean gradient"))
    return parts


def _text(x: object, y: object, anchor: str, text: str, kind: str = "axis") -> str:
    place = f'class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _circle(kind: str, place: tuple[float, float], radius: int, title: str) -> str:
    x, y = place
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def _label(kind: str, place: tuple[float, float], text: str) -> str:
    """Return the label of a point, on its left near the right edge."""
    x, y = place
    if x > _WIDE - _RIGHT - 80:
        return _text(f"{x - 10:.1f}", f"{y:.1f}", "end", text, kind)
    return _text(f"{x + 10:.1f}", f"{y:.1f}", "start", text, kind)


def _title(name: str, answer: PlanResult) -> str:
    step, variance = duration(answer.evaluation.seconds), answer.evaluation.variance
    return f"<title>{html.escape(f'{name}: {step} a step, variance {variance:.4g}')}</title>"
