"""What it takes to quantize a tensor of any size, from those that were quantized."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy

from qsync_fx.profiling.profile import Quantizing
from qsync_fx.profiling.samples import Sample


def fitted(plans: Iterable[Sequence[Sample]]) -> list[Quantizing]:
    """Returns for each pair of formats the line through all times of quantizers, each a median over rounds."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for samples in plans:
        for calls in zip(*(sample.quantized for sample in samples), strict=True):
            seconds = statistics.median(call.seconds for call in calls)
            times[calls[0].before, calls[0].after].append((calls[0].numel, seconds))
    return [_line(before, after, found) for (before, after), found in times.items()]


def _line(before: str, after: str, times: Sequence[tuple[int, float]]) -> Quantizing:
    """Fits a line that is right in relation to what it fits, and nowhere negative."""
    numel, seconds = (numpy.array(column, dtype=float) for column in zip(*times, strict=True))
    weights = 1 / numpy.sqrt(numpy.maximum(seconds, 1e-9))
    columns = numpy.stack([numpy.ones_like(numel), numel], axis=1) * weights[:, None]
    fixed, each = numpy.linalg.lstsq(columns, seconds * weights, rcond=None)[0]
    if fixed < 0 or each < 0:
        fixed, each = (
            (0.0, float((seconds * weights**2 * numel).sum() / (weights**2 * numel**2).sum()))
            if fixed < 0
            else (float(seconds.mean()), 0.0)
        )
    return Quantizing(before, after, float(fixed), float(each), int(numel.max()))
