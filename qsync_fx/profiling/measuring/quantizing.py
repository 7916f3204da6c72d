"""What it takes to quantize a tensor of any size, from those that were quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from qsync_fx.profiling.runs import Run


@dataclass(frozen=True)
class Quantizing:
    """`fixed + each * elements` seconds.

    Attributes:
        largest: elements of the largest tensor that was quantized.
    """

    fixed: float
    each: float
    largest: int

    def seconds(self, numel: int) -> float:
        return self.fixed + self.each * numel


def fitted(runs: Iterable[Run]) -> Mapping[tuple[str, str], Quantizing]:
    """Returns for each pair of formats, by name, the line through all times of quantizers."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for run in runs:
        for call in run.quantized:
            times[call.before, call.after].append((call.numel, call.seconds))
    return {pair: _line(found) for pair, found in times.items()}


def _line(times: Sequence[tuple[int, float]]) -> Quantizing:
    """Fits a line that is nowhere negative, by squares in relation to what it fits: large tensors count as much as small ones."""
    numel, seconds = (numpy.array(column, dtype=float) for column in zip(*times, strict=True))
    weights = 1 / numpy.sqrt(numpy.maximum(seconds, 1e-9))
    ones = numpy.ones_like(numel)
    fixed, each = numpy.linalg.lstsq(
        numpy.stack([ones, numel], axis=1) * weights[:, None], seconds * weights, rcond=None
    )[0]
    if each < 0 or (numel == numel[0]).all():
        fixed, each = seconds.mean(), 0.0
    elif fixed < 0:
        fixed, each = 0.0, (seconds * weights**2 * numel).sum() / (weights**2 * numel**2).sum()
    return Quantizing(float(fixed), float(each), int(numel.max()))
