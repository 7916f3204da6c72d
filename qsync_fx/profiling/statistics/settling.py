"""When a sensitivity is known well enough: where more steps would only say again what those so far have said.

A plan weighs operators against one another. What makes all of them more or less in a step, as a batch with a greater loss does, says
nothing of that; so it is asked how well the ratio of each operator to the sum over all of them is known, and of that sum itself half as
well is enough.

Invariant: it goes by what has been found alone, so that a run that goes on from one that was interrupted ends at the same step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from qsync_fx.profiling.statistics.step import Key

LEAST: Final = 4
"""Steps without which nothing is known of how steps differ."""
SHARE: Final = 0.2
"""Of the sum over all operators in a precision: that and less of an operator's own weighs no more where plans are chosen."""


def settled(trace: Sequence[Mapping[Key, float]], within: float) -> bool:
    """Returns whether the mean over steps is known of each operator and precision.

    Args:
        trace: of each step, the variance that an operator adds in a precision.
        within: the standard error that is allowed of a mean in proportion to the sum over all operators in that precision, as a share of
            that mean or, where that is more, of a fifth of the sum's; of the sum's own mean twice that is.
    """
    if len(trace) < LEAST:
        return False
    # Graphs that came with a later step have operators that the first ones do not know: they add nothing there.
    found = {key: [step.get(key, 0.0) for step in trace] for key in set().union(*trace)}
    sums: dict[str, list[float]] = {}
    for (_, precision), values in found.items():
        sums[precision] = [a + b for a, b in zip(sums.get(precision, [0.0] * len(trace)), values, strict=True)]
    whole = {precision: statistics.fmean(values) for precision, values in sums.items()}
    if not all(_error(values) <= 2 * within * whole[precision] for precision, values in sums.items()):
        return False
    for (_, precision), values in found.items():
        mean, beside = statistics.fmean(values), sums[precision]
        # A step's own sum tells how much of the mean is to be expected in it.
        share = mean / whole[precision] if whole[precision] else 0.0
        left = [value - share * total for value, total in zip(values, beside, strict=True)]
        if _error(left) > within * max(mean, SHARE * whole[precision]):
            return False
    return True


def _error(values: Sequence[float]) -> float:
    """Returns the standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values))
