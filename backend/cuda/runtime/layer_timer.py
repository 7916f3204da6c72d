"""Timing of whole layers, compiled as in training, in a narrow format and in the 16-bit format.

The time of a gradient is a step with this gradient alone minus the forward pass. Formats and
parts are interleaved, so that changes of the clock affect all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from qsync_fx.backend.cuda.layer_times import LayerTimes, Part
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem import type_of
from qsync_fx.backend.cuda.runtime.event_timer import SECONDS, row_seconds
from qsync_fx.backend.cuda.tuning import TuningError, shown

_WARM_UP: Final = 3
_MOST_RUNS: Final = 20

_FORWARD: Final[Part] = "forward"
_TRAINED: Final[dict[Part, tuple[bool, bool]]] = {
    "forward": (False, False),
    "input_gradient": (True, False),
    "weight_gradient": (False, True),
}
"""Whether input and weight require a gradient in the step that times a part."""


def layer_of(problem: Problem, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return the layer of a `layer_problem`, and an input, in the format of the problem."""
    dtype = type_of(problem.a)
    if isinstance(problem, GemmProblem):
        linear = nn.Linear(problem.k, problem.n, device=device, dtype=dtype)
        return linear, torch.randn(problem.m, problem.k, device=device, dtype=dtype)
    p = problem
    convolution = nn.Conv2d(
        p.c, p.k, (p.r, p.s), p.stride, p.padding, p.dilation, device=device, dtype=dtype
    )
    image = torch.randn(p.n, p.c, p.h, p.w, device=device, dtype=dtype)
    weight = convolution.weight.detach().to(memory_format=torch.channels_last)
    convolution.weight = nn.Parameter(weight)
    return convolution, image.to(memory_format=torch.channels_last)


def time_layer(
    problem: Problem,
    precision: str,
    device: torch.device,
    rounds: int,
    options: Mapping[str, object] | None = None,
) -> LayerTimes:
    """Measure one layer.

    Args:
        problem: the layer, see `layer_times.layer_problem`; its format is the 16-bit one.
        rounds: number of measurements of each part; their median is returned.
        options: more options of the backend.

    Raises:
        TuningError: the device has too little memory, or the measurements are too noisy.
    """
    try:
        medians = _medians(problem, precision, device, rounds, options or {})
    except torch.OutOfMemoryError as error:
        message = "the device has too little free memory for this layer"
        raise TuningError(message, where=shown(problem), do="tune smaller batches") from error
    seconds = {fmt: _by_part(medians, fmt) for fmt in (precision, problem.a)}
    if any(value <= 0 for parts in seconds.values() for value in parts.values()):
        message = "a gradient took no longer than the forward pass alone: the device is busy"
        raise TuningError(message, where=shown(problem), do="stop other programs on the device")
    return LayerTimes(problem, precision, seconds[precision], seconds[problem.a])


def _by_part(medians: Mapping[tuple[str, Part], float], fmt: str) -> dict[str, float]:
    forward = medians[fmt, _FORWARD]
    parts: dict[str, float] = {part: medians[fmt, part] - forward for part in _TRAINED}
    return parts | {_FORWARD: forward}


def _medians(
    problem: Problem,
    precision: str,
    device: torch.device,
    rounds: int,
    options: Mapping[str, object],
) -> dict[tuple[str, Part], float]:
    """Return the median seconds of the steps that time each part, by format and part."""
    runs: dict[tuple[str, Part], Callable[[], Any]] = {}
    for fmt in (precision, problem.a):
        for part in _TRAINED:
            runs[fmt, part] = _step(problem, fmt, part, device, options)
    measured: dict[tuple[str, Part], list[float]] = {key: [] for key in runs}
    counts = {}
    for key, run in runs.items():
        for _ in range(_WARM_UP):
            run()
        took = _row(run, 1, device)
        counts[key] = max(1, min(_MOST_RUNS, int(SECONDS / took)))
    for _ in range(rounds):
        for key, run in runs.items():
            measured[key].append(_row(run, counts[key], device))
    return {key: statistics.median(values) for key, values in measured.items()}


def _step(
    problem: Problem, fmt: str, part: Part, device: torch.device, options: Mapping[str, object]
) -> Callable[[], Any]:
    layer, x = layer_of(problem, device)
    by_input, by_weight = _TRAINED[part]
    layer.requires_grad_(by_weight)
    x.requires_grad_(by_input)
    every: dict[str, Any] = {**options, "precision": fmt, "skip_unprofitable": False}
    compiled = torch.compile(layer, backend="qsync", options=every, dynamic=False)
    leaves = [x] * by_input + list(layer.parameters()) * by_weight
    if not leaves:
        return lambda: compiled(x)
    gradient = torch.randn_like(compiled(x))
    return lambda: torch.autograd.grad(compiled(x), leaves, gradient)


def _row(run: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the mean seconds of a run; on the CPU of its own time, without other processes."""
    if device.type == "cuda":
        return row_seconds([run], count, device)
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count
