"""Sensitivity of a model: variance that each operator adds to the gradients, by precision.

No number is negative or NaN. Files store infinite numbers as the largest float.
"""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.errors import PlanError, ProfileError, nearest, shown
from qsync_fx.formats import FORMATS
from qsync_fx.plan.operator_id import OpId
from qsync_fx.serialization.schema import Path, Schema
from qsync_fx.text_tables import Fitted, plain, table_of


def sensitivity_table(result: Sensitivity) -> RenderableType:
    """Return each operator's variance by precision with its share of the total, and a summary."""
    names = result.precisions
    sums = {name: sum(by.get(name, 0.0) for by in result.variance.values()) for name in names}
    numeric = [cell for name in names for cell in (name, f"of {name}")]
    table = table_of(["operator", *numeric], right=numeric)
    for operator, by in result.variance.items():
        cells = []
        for name in names:
            variance, share = "-", "-"
            if name in by:
                variance = f"{by[name]:.2e}"
            if name in by and 0 < sums[name] < math.inf:
                share = f"{by[name] / sums[name]:.1%}"
            cells += [variance, share]
        table.add_row(Text(operator), *cells)
    parts = [f"variance added to the gradients of {result.model}", f"method {result.method}"]
    if result.steps:
        parts.append(f"mean over {result.steps} steps")
    parts.append(f"{result.seconds:.0f} s")
    if result.noise_scale is not None:
        parts.append(f"gradient noise scale {result.noise_scale:.3g} samples")
    return Group(Fitted(table), Text(", ".join(parts)))


Values = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Sensitivity:
    """Variance that each operator adds to the gradients of a model, by precision.

    Attributes:
        variance: by operator and precision, summed over all elements of all gradients and averaged
            over steps. For a narrow format that rounds to nearest it is the mean square error.
        trace: `variance` of each step, in order; empty for a method without steps.
        gradients: by parameter and gradient codec, the variance that encoding the gradient once
            adds to it; empty if codecs were not measured.
        noise: variance of the exact gradient between batches, summed over all elements; None if it
            was not measured, as with a single batch.
        noise_scale: gradient noise scale in samples, the trace of the covariance of the gradients
            of single samples divided by the square norm of their mean G: the batch size at which
            the noise of the mean gradient equals that norm (McCandlish et al., "An Empirical Model
            of Large-Batch Training", 2018, Eq. 2.9). None if it was not measured, or if the noise
            hides G in the measured steps.
    """

    method: str
    model: str
    variance: Values
    steps: int = 0
    trace: Sequence[Values] = field(default=(), repr=False)
    seconds: float = 0.0
    gradients: Values = field(default_factory=dict, repr=False)
    noise: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", tuple(self.trace))
        for table in (self.variance, *self.trace, self.gradients):
            for operator, by in table.items():
                for name, number in by.items():
                    if not number >= 0:
                        message = f"the sensitivity {number} is no variance"
                        do = "look for NaN in the loss and the gradients of the model"
                        raise ProfileError(message, where=f"{operator}, {name}", do=do)

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

        It is 0 for unmeasured precisions of 32 bits or more; others raise `ProfileError`.
        """
        name = str(operator)
        by = self.variance.get(name)
        if by is None:
            message = f"the sensitivity of {shown(name)} is unknown"
            raise ProfileError(message, do=nearest(name, self.variance))
        if precision in by:
            return by[precision]
        if precision in FORMATS and FORMATS[precision].bits >= 32:
            return 0.0
        message = f"the sensitivity in {shown(precision)} was not computed"
        raise ProfileError(message, where=name, do=nearest(precision, by))

    def at_batch(self, before: float, after: float) -> Sensitivity:
        """Return the sensitivity with `after` instead of `before` samples per step of a device.

        The gradient of a device is a mean over its samples, so `variance`, `trace` and `noise`
        scale with `before / after`. For rounding this is an assumption: errors of activations and
        of their gradients are independent between samples, but all samples share the rounding error
        of a weight, which does not average out. The error of a gradient codec is proportional to
        the mean square of the gradient, `|G|^2 + tr(Sigma) / batch`; without a noise scale,
        `gradients` do not change.
        """
        share, coded = before / after, 1.0
        if self.noise_scale is not None:
            coded = (1 + self.noise_scale / after) / (1 + self.noise_scale / before)
        return replace(
            self,
            variance=_times(self.variance, share),
            trace=[_times(values, share) for values in self.trace],
            gradients=_times(self.gradients, coded),
            noise=None if self.noise is None else self.noise * share,
        )

    def to_json(self) -> str:
        """Return the sensitivity as JSON text."""
        return SENSITIVITY.encode(self.finite())

    def save(self, path: Path) -> None:
        """Write the sensitivity to a file atomically; raise `ProfileError` if that fails."""
        SENSITIVITY.write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Sensitivity:
        """Read a file from any source; raise `ProfileError` that locates a defect."""
        return SENSITIVITY.load(path)

    def finite(self) -> Sensitivity:
        """Return the sensitivity as files store it, without infinite numbers."""
        trace = [_finite(values) for values in self.trace]
        variance, gradients = _finite(self.variance), _finite(self.gradients)
        return replace(self, variance=variance, trace=trace, gradients=gradients)

    def __str__(self) -> str:
        return plain(sensitivity_table(self))


def _times(values: Values, factor: float) -> dict[str, dict[str, float]]:
    return {op: {name: v * factor for name, v in by.items()} for op, by in values.items()}


def _finite(values: Values) -> dict[str, dict[str, float]]:
    return {
        op: {name: min(v, sys.float_info.max) for name, v in by.items()}
        for op, by in values.items()
    }


def check(result: Sensitivity) -> str | None:
    """Return why the contents of a file are invalid; None if they are valid."""
    if min(result.steps, result.seconds, result.noise or 0.0, result.noise_scale or 0.0) < 0:
        return "steps, seconds, noise and noise scale are not negative"
    for values in (result.variance, *result.trace):
        for operator, by in values.items():
            try:
                OpId.parse(operator)
            except PlanError as error:
                return error.what
            if unknown := by.keys() - FORMATS.keys():
                return f"{shown(min(unknown))} is not a precision"
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


@dataclass(frozen=True)
class Agreement:
    """Agreement of a method with a reference sensitivity; undefined values are NaN.

    `ratio` is the geometric mean of the ratio to the reference. `spread` is the largest reference
    value divided by the smallest; the Spearman rank correlation means little if it is small.
    """

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
    return Agreement(len(pairs), spearman(ours, theirs), ratio, spread)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the Spearman rank correlation of two lists; equal values have their mean rank."""
    try:
        return statistics.correlation(_ranks(first), _ranks(second))
    except statistics.StatisticsError:  # fewer than two values, or all are equal
        return math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(bisect_left(order, v) + bisect_right(order, v) - 1) / 2 for v in values]
