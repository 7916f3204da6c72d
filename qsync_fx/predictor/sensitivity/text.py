"""A sensitivity as a table, as wide as what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qsync_fx.predictor.sensitivity.value import Sensitivity


def table(found: Sensitivity) -> str:
    """Returns one line an operator: its variance in each precision, and its share of the sum of that precision."""
    names = found.precisions
    sums = {name: sum(by.get(name, 0.0) for by in found.variance.values()) for name in names}
    rows = [["operator", *(cell for name in names for cell in (name, "share"))]]
    for operator, by in found.variance.items():
        rows.append([operator, *(cell for name in names for cell in _cells(by.get(name), sums[name]))])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", summary(found)])


def summary(found: Sensitivity) -> str:
    """Returns one line on how it was found."""
    steps = f", mean over {found.steps} steps" if found.steps else ""
    return f"variance added to the gradients of {found.model}, method {found.method}{steps}, {found.seconds:.0f} s"


def _cells(value: float | None, total: float) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    return f"{value:.2e}", f"{value / total:.1%}" if 0 < total < float("inf") else "-"
