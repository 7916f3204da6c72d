"""How well one sensitivity tells what another does: of two methods, or of a method and the truth.

Invariant: operators that either knows nothing of do not count, and none that adds nothing in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity


@dataclass(frozen=True)
class Agreement:
    """
    Attributes:
        method: of the one that is held to the other.
        precision: in which.
        operators: how many are compared.
        spearman: correlation of their ranks; NaN where there are fewer than two, or all are equal.
        ratio: how many times the truth it is, a geometric mean; NaN where either has zeros.
        spread: the largest truth divided by the smallest: where operators are alike, ranks mean little.
    """

    method: str
    precision: str
    operators: int
    spearman: float
    ratio: float
    spread: float


def agreement(result: Sensitivity, truth: Sensitivity, precision: str) -> Agreement:
    """Returns how well `found` tells `truth` in a precision."""
    pairs = [
        (result.variance[name][precision], by[precision])
        for name, by in truth.variance.items()
        if precision in by and precision in result.variance.get(name, {})
    ]
    pairs = [pair for pair in pairs if any(pair)]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    logs = [math.log(a / b) if a > 0 and b > 0 and math.isfinite(a / b) else math.nan for a, b in pairs]
    ratio = math.exp(sum(logs) / len(logs)) if logs else math.nan
    spread = max(theirs) / min(theirs) if theirs and min(theirs) > 0 else math.nan
    return Agreement(result.method, precision, len(pairs), spearman(ours, theirs), ratio, spread)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the correlation of the ranks of two lists, equal values with their mean rank."""
    if len(first) < 2:
        return math.nan
    a, b = _ranks(first), _ranks(second)
    middle = (len(a) - 1) / 2
    product = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    squares = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return product / math.sqrt(squares) if squares else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + end - 1) / 2
        start = end
    return ranks
