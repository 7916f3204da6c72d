"""A profile of a model on a device that is not at hand: reckoned by the catalog, in place of one that `measure` took there.

Invariant: a profile like any other, but that its machine is one of the catalog, and that what a step holds is foreseen, not seen:
without what its optimizer takes, where that one cannot be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qsync_fx.devices import Device
from qsync_fx.devices.machine import of_catalog as machine_of
from qsync_fx.errors import OptionError
from qsync_fx.formats import FORMATS, Precision, precisions as named
from qsync_fx.module_paths import unwrapped
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import States, scheduled, states
from qsync_fx.predictor.memory import OptimizerMemory, TrainingMemory as Held, step_memory
from qsync_fx.predictor.model import build_model_graph
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.predictor.times import Entry, Part
from qsync_fx.profiler.measurement import GivenOptimizer, optimizer_of
from qsync_fx.profiler.observed_step import observed, profile_plans
from qsync_fx.profiler.profile import Collective, Profile
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized
from qsync_fx.profiler.timing.measured_memory import known_memory
from qsync_fx.profiler.timing.step_timers import StepFunction, TrainingStep, clock_for
from qsync_fx.profiler.training_state import untouched

_SIZES = tuple(2**power for power in range(16, 31))


def of_catalog(
    device: Device,
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    precisions: Sequence[str | Precision] | None = None,
    optimizer: GivenOptimizer | None = None,
) -> Profile:
    """Returns what a device would take; the step runs once, as written, to see what it gives the model, then its loss alone.

    See `Device.profile`.
    """
    formats = _formats(device, precisions)
    updating = optimizer_of(unwrapped(model), optimizer)
    training = TrainingStep(step, batch, updating, lambda: model.zero_grad(set_to_none=True), clock_for(1))
    # Whatever sizes the model was compiled for before, its times are those of this batch.
    with untouched(model, updating), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        visited = observed(model, training, {"target": device.target})
    graph = build_model_graph(visited.explanation, [fmt.name for fmt in formats])
    times = DeviceTimes(device, graph, _moved(updating))
    memory = known_memory(updating)
    live = Held(memory or OptimizerMemory(), loss=visited.loss)
    plans = {label: states(graph, plan) for label, (plan, _) in profile_plans(visited.explanation, formats).items()}
    seconds = times.optimizer() if updating is not None else 0.0
    return Profile(
        machine_of(device),
        # The target is the machine, and no condition of its times.
        replace(visited.model, options=""),
        stored(graph),
        [fmt.name for fmt in formats],
        [_run(label, item, times, seconds, live) for label, item in plans.items()],
        type(updating).__name__ if updating is not None else "",
        _collectives(device),
        optimizer_memory=memory,
        loss_memory=visited.loss,
    )


def _formats(device: Device, precisions: Sequence[str | Precision] | None) -> list[Precision]:
    if precisions is None:
        return [fmt for fmt in FORMATS.values() if fmt.name in device.units and fmt.bits <= 32]
    result = named(precisions)
    if not result:
        raise OptionError("no precision is asked for", where="precisions", do="name one or more")
    return result


def _run(label: str, result: States, times: DeviceTimes, optimizer: float, live: Held) -> MeasuredRun:
    """Casts between plain formats are part of the operators' times, as they are where they are measured."""
    step = scheduled(result, times)
    forward, backward = (_by_operator(entries) for entries in (step.forward, step.backward))
    quantized = _quantized(result, times)
    for item in quantized:
        forward[item.operator] -= item.seconds
    measured = [
        MeasuredOperator(op.id, *names, max(0.0, forward[op.id]), backward[op.id])
        for op, names in zip(result.graph.operators, result.names, strict=True)
    ]
    full = (sum(entry.seconds for entry in step.forward), sum(entry.seconds for entry in step.backward), optimizer)
    return MeasuredRun(label, [full], step_memory(result, live).step_bytes, measured, quantized)


def _by_operator(entries: Sequence[Entry]) -> dict[str, float]:
    result: dict[str, float] = {}
    for entry in entries:
        if entry.part is not Part.OUTSIDE:
            result[entry.operator] = result.get(entry.operator, 0.0) + entry.seconds
    return result


def _quantized(result: States, times: DeviceTimes) -> list[Quantized]:
    quantized = []
    for cast in result.casts:
        if FORMATS[cast.after].scaled:
            owner, value = result.graph.operators[cast.owner].id, result.graph.values[cast.value]
            seconds = times.cast(owner, cast.before, cast.after, value.numel, value.differentiated).forward
            quantized.append(Quantized(owner, cast.before, cast.after, value.numel, False, seconds))
    return quantized


def _collectives(device: Device) -> list[Collective]:
    return [
        Collective("nccl", item.ranks, [(int(size), device.allreduce_seconds(size, item.ranks)) for size in _SIZES])
        for item in device.reductions
    ]


def _moved(optimizer: Optimizer | None) -> float:
    """Returns the bytes that an optimizer moves for a parameter: all is read, and all but the gradient written."""
    settings = optimizer.defaults if optimizer is not None else {}
    saved = 2 if "betas" in settings else 1 if settings.get("momentum") else 0
    return 4.0 * (3 + 2 * saved)
