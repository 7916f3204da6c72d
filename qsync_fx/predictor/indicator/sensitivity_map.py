"""Sensitivity of a model: variance that each operator adds to the gradients, by precision.

Invariant: a `Sensitivity` is a value, and `from_json` restores it from `to_json`. No number is
negative or NaN. Files store infinite numbers as the largest float.
"""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from qsync_fx.errors import PlanError, ProfileError, nearest, shown
from qsync_fx.formats import FORMATS
from qsync_fx.plan.operator_id import OpId
from qsync_fx.serialization.schema import Path, Schema


def table(result: Sensitivity) -> str:
    """Return a sensitivity as a text table, one line per operator, followed by its summary."""
    cells = rows(result)
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]
    lines = []
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *numbers)).rstrip())
    return "\n".join([*lines, "", summary(result)])


def rows(result: Sensitivity) -> list[list[str]]:
    """Return a header, then each operator's variance by precision with its share of the total."""
    names = result.precisions
    sums = {name: sum(by.get(name, 0.0) for by in result.variance.values()) for name in names}
    cells = [["operator", *(cell for name in names for cell in (name, f"of {name}"))]]
    for operator, by in result.variance.items():
        cells.append(
            [operator, *(cell for name in names for cell in _cells(by.get(name), sums[name]))]
        )
    return cells


def summary(result: Sensitivity) -> str:
    """Return one line with the model, the method, its steps and its duration."""
    parts = [f"variance added to the gradients of {result.model}", f"method {result.method}"]
    if result.steps:
        parts.append(f"mean over {result.steps} steps")
    return ", ".join([*parts, f"{result.seconds:.0f} s"])


def _cells(value: float | None, total: float) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    return f"{value:.2e}", f"{value / total:.1%}" if 0 < total < float("inf") else "-"


Values = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Sensitivity:
    """Variance that each operator adds to the gradients of a model, by precision.

    Attributes:
        method: name of the indicator.
        model: class name of the model.
        variance: by operator and precision, summed over all elements of all gradients and averaged
            over steps. For a narrow format that rounds to nearest it is the mean square error.
        steps: number of steps in the mean.
        trace: `variance` of each step, in order; empty for a method without steps.
        seconds: duration of the measurement.
        gradients: by parameter and gradient codec, the variance that encoding the gradient once
            adds to it; empty in files from before codecs were measured.
    """

    method: str
    model: str
    variance: Mapping[str, Mapping[str, float]]
    steps: int = 0
    trace: Sequence[Mapping[str, Mapping[str, float]]] = field(default=(), repr=False)
    seconds: float = 0.0
    gradients: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", tuple(self.trace))
        for table in (self.variance, *self.trace, self.gradients):
            for operator, by in table.items():
                for name, number in by.items():
                    if not number >= 0:
                        raise ProfileError(
                            f"the sensitivity {number} is no variance",
                            where=f"{operator}, {name}",
                            do="look for NaN in the loss and the gradients of the model",
                        )

    @property
    def operators(self) -> list[str]:
        """Operator ids in the order of `explain`."""
        return list(self.variance)

    @property
    def precisions(self) -> list[str]:
        """Precisions in the requested order."""
        return list(dict.fromkeys(name for by in self.variance.values() for name in by))

    def of(self, operator: str | OpId, precision: str) -> float:
        """Return the variance that an operator adds in a precision.

        It is 0 for unmeasured precisions of 32 bits or more.

        Raises:
            ProfileError: the operator or the precision is not in the sensitivity.
        """
        by = self.variance.get(str(operator))
        if by is None:
            raise ProfileError(
                f"the sensitivity of {shown(str(operator))} is unknown",
                do=nearest(str(operator), self.variance),
            )
        if precision in by:
            return by[precision]
        if precision in FORMATS and FORMATS[precision].bits >= 32:
            return 0.0
        raise ProfileError(
            f"the sensitivity in {shown(precision)} was not computed",
            where=str(operator),
            do=nearest(precision, by),
        )

    def ranks(self, precision: str) -> list[dict[str, int]]:
        """Return each operator's rank in each step, 0 for the most sensitive (QSync, Fig. 8)."""
        result = []
        for values in self.trace:
            available = [(by[precision], name) for name, by in values.items() if precision in by]
            order = sorted(available, key=lambda pair: -pair[0])
            result.append({name: rank for rank, (_, name) in enumerate(order)})
        return result

    def to_json(self) -> str:
        """Return the sensitivity as JSON text."""
        return SENSITIVITY.encode(self.finite())

    @classmethod
    def from_json(cls, text: str | bytes) -> Sensitivity:
        """Return the sensitivity of a `to_json` text; raise `ProfileError` for any other text."""
        return SENSITIVITY.decode(text)

    def save(self, path: Path) -> None:
        """Write the sensitivity to a file atomically; raise `ProfileError` if that fails."""
        SENSITIVITY.write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Sensitivity:
        """Read a file from any source; raise `ProfileError` that locates a defect."""
        return SENSITIVITY.load(path)

    def finite(self) -> Sensitivity:
        """Return the sensitivity as files store it, without infinite numbers."""
        return replace(
            self,
            variance=_finite(self.variance),
            trace=[_finite(values) for values in self.trace],
            gradients=_finite(self.gradients),
        )

    def table(self) -> str:
        """Return the text table that `print` shows."""
        return table(self)

    def __str__(self) -> str:
        return self.table()


def _finite(values: Values) -> dict[str, dict[str, float]]:
    return {
        op: {name: min(v, sys.float_info.max) for name, v in by.items()}
        for op, by in values.items()
    }


def check(result: Sensitivity) -> str | None:
    """Return why the contents of a file are invalid; None if they are valid."""
    if result.steps < 0 or result.seconds < 0:
        return "neither steps nor seconds are negative"
    for table in (result.variance, *result.trace):
        for operator, by in table.items():
            try:
                OpId.parse(operator)
            except PlanError as error:
                return error.what
            if (unknown := next((name for name in by if name not in FORMATS), None)) is not None:
                return f"{shown(unknown)} is not a precision"
            if not all(v >= 0 and math.isfinite(v) for v in by.values()):
                return f"a variance of {shown(operator)} is negative"
    for parameter, by in result.gradients.items():
        if not all(v >= 0 and math.isfinite(v) for v in by.values()):
            return f"a variance of the gradient of {shown(parameter)} is negative"
    return None


CHECKS: Final = {Sensitivity: check}
"""Checks for a schema that contains a sensitivity."""

SENSITIVITY: Final = Schema(
    Sensitivity,
    noun="sensitivity",
    error=ProfileError,
    remedy="save what qsync_fx.sensitivity returned",
    name="qsync-sensitivity",
    largest=64 * 2**20,
    checks=CHECKS,
)
"""Schema of files with a single sensitivity."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a method with a reference sensitivity.

    Attributes:
        method: name of the compared method.
        precision: precision of the comparison.
        operators: number of compared operators.
        spearman: Spearman rank correlation; NaN for fewer than two operators or equal ranks.
        ratio: geometric mean of the ratio to the reference; NaN if either contains zeros.
        spread: largest reference value divided by the smallest. Ranks mean little if it is small.
    """

    method: str
    precision: str
    operators: int
    spearman: float
    ratio: float
    spread: float


def agreement(result: Sensitivity, truth: Sensitivity, precision: str) -> Agreement:
    """Return how well `result` predicts `truth` in a precision."""
    pairs = [
        (result.variance[name][precision], by[precision])
        for name, by in truth.variance.items()
        if precision in by and precision in result.variance.get(name, {})
    ]
    pairs = [pair for pair in pairs if any(pair)]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    logs = [
        math.log(a / b) if a > 0 and b > 0 and math.isfinite(a / b) else math.nan for a, b in pairs
    ]
    ratio = math.exp(sum(logs) / len(logs)) if logs else math.nan
    spread = max(theirs) / min(theirs) if theirs and min(theirs) > 0 else math.nan
    return Agreement(result.method, precision, len(pairs), spearman(ours, theirs), ratio, spread)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the Spearman rank correlation of two lists; equal values have their mean rank."""
    try:
        return statistics.correlation(_ranks(first), _ranks(second))
    except statistics.StatisticsError:  # fewer than two values, or all are equal
        return math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 0; equal values have their mean rank."""
    order = sorted(values)
    return [(bisect_left(order, v) + bisect_right(order, v) - 1) / 2 for v in values]
