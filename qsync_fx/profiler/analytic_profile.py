"""Profiles of devices that are not present: times are computed from the catalog.

Invariant: the profile is like a measured one, except that its machine is a catalog device and that its memory is
predicted. The optimizer's memory is left out if it cannot be determined.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qsync_fx.devices import Device, get
from qsync_fx.devices.machine import of_catalog as machine_of
from qsync_fx.errors import OptionError
from qsync_fx.formats import FORMATS, Precision, precisions as named
from qsync_fx.module_paths import unwrapped
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import States, scheduled, states
from qsync_fx.predictor.memory import OptimizerMemory, TrainingMemory as Held, step_memory
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.predictor.times import Entry, Part
from qsync_fx.profiler.measurement import GivenOptimizer, optimizer_of
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.observed_step import observed, profile_plans
from qsync_fx.profiler.profile import Collective, Profile
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized
from qsync_fx.profiler.timing.measured_memory import known_memory
from qsync_fx.profiler.timing.step_timers import StepFunction, TrainingStep, clock_for
from qsync_fx.profiler.training_state import untouched

_SIZES = tuple(2**power for power in range(16, 31))


def catalog_profile(
    device: Device | str | os.PathLike[str],
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    precisions: Sequence[str | Precision] | None = None,
    optimizer: GivenOptimizer | None = None,
) -> Profile:
    """Return the profile of a model on a device of the catalog, with computed times in place of measured ones.

    The step runs on this machine: once with the model, and twice without it.

    Args:
        device: of `qsync_fx.devices.get`, or its name, or the path of a TOML file that describes it.
        model: the model, as for `qsync_fx.measure`.
        step: takes the model and a batch, and returns the loss.
        batch: the argument of `step`.
        precisions: formats that plans may use; by default those that the device has units for.
        optimizer: an optimizer of the model, or a callable that makes one of its parameters; None to leave its time
            and memory out.

    Raises:
        DeviceError: if there is no such device.
        OptionError: for arguments that cannot be used.
    """
    if not isinstance(device, Device):
        device = get(device)
    formats = _formats(device, precisions)
    updating = optimizer_of(unwrapped(model), optimizer)
    training = TrainingStep(
        step, batch, updating, lambda: model.zero_grad(set_to_none=True), clock_for(1)
    )
    # Whatever sizes the model was compiled for before, its times are those of this batch.
    with untouched(model, updating), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        visited = observed(model, training, {"target": device.target})
    graph = build_model_graph(visited.explanation, [fmt.name for fmt in formats])
    times = DeviceTimes(device, graph, _moved(updating))
    memory = known_memory(updating)
    live = Held(memory or OptimizerMemory(), loss=visited.loss)
    plans = {
        label: states(graph, plan)
        for label, (plan, _) in profile_plans(visited.explanation, formats).items()
    }
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


def _run(
    label: str, result: States, times: DeviceTimes, optimizer: float, live: Held
) -> MeasuredRun:
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
    full = (
        sum(entry.seconds for entry in step.forward),
        sum(entry.seconds for entry in step.backward),
        optimizer,
    )
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
            seconds = times.cast(
                owner, cast.before, cast.after, value.numel, value.differentiated
            ).forward
            quantized.append(Quantized(owner, cast.before, cast.after, value.numel, False, seconds))
    return quantized


def _collectives(device: Device) -> list[Collective]:
    return [
        Collective(
            "nccl",
            item.ranks,
            [(int(size), device.allreduce_seconds(size, item.ranks)) for size in _SIZES],
        )
        for item in device.reductions
    ]


def _moved(optimizer: Optimizer | None) -> float:
    """Returns the bytes that an optimizer moves for a parameter: all is read, and all but the gradient written."""
    settings = optimizer.defaults if optimizer is not None else {}
    saved = 2 if "betas" in settings else 1 if settings.get("momentum") else 0
    return 4.0 * (3 + 2 * saved)
