"""A sensitivity as a table, as wide as what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qsync_fx.predictor.sensitivity.value import Sensitivity


def table(found: Sensitivity) -> str:
    """Returns the rows as text, one line an operator, and how it was found."""
    cells = rows(found)
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = []
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *numbers)).rstrip())
    return "\n".join([*lines, "", summary(found)])


def rows(found: Sensitivity) -> list[list[str]]:
    """Returns a heading, and for each operator its variance in each precision and its share of the sum of that precision."""
    names = found.precisions
    sums = {name: sum(by.get(name, 0.0) for by in found.variance.values()) for name in names}
    cells = [["operator", *(cell for name in names for cell in (name, f"of {name}"))]]
    for operator, by in found.variance.items():
        cells.append([operator, *(cell for name in names for cell in _cells(by.get(name), sums[name]))])
    return cells


def summary(found: Sensitivity) -> str:
    """Returns one line on how it was found."""
    steps = f", mean over {found.steps} steps" if found.steps else ""
    return f"variance added to the gradients of {found.model}, method {found.method}{steps}, {found.seconds:.0f} s"


def _cells(value: float | None, total: float) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    return f"{value:.2e}", f"{value / total:.1%}" if 0 < total < float("inf") else "-"
