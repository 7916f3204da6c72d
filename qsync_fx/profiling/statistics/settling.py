"""When a sensitivity is known well enough: where more steps would only say again what those so far have said.

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
SHARE: Final = 0.1
"""Of the sum over all operators in a precision: that and less of an operator's own weighs no more where plans are chosen."""


def settled(trace: Sequence[Mapping[Key, float]], within: float) -> bool:
    """Returns whether the mean over steps is known of each operator and precision.

    Args:
        trace: of each step, the variance that an operator adds in a precision.
        within: the standard error of a mean that is allowed, as a share of the mean itself or, where that is more, of a tenth of the mean
            over all operators' sum in that precision.
    """
    if len(trace) < LEAST:
        return False
    # Graphs that came with a later step have operators that the first ones do not know: they add nothing there.
    found = {key: [step.get(key, 0.0) for step in trace] for key in set().union(*trace)}
    sums: dict[str, float] = {}
    for (_, precision), values in found.items():
        sums[precision] = sums.get(precision, 0.0) + statistics.fmean(values)
    return all(
        statistics.stdev(values) / math.sqrt(len(values))
        <= within * max(statistics.fmean(values), SHARE * sums[key[1]])
        for key, values in found.items()
    )
