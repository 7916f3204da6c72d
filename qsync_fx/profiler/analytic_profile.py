"""Profiles of catalog devices, with computed times and predicted memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from qsync_fx import torch_internals as internals
from qsync_fx.devices import Device, get
from qsync_fx.devices.machine import of_catalog as machine_of
from qsync_fx.diagnostics.model_state import without_training
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.module_paths import unwrapped
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import States, scheduled, states
from qsync_fx.predictor.cost_mapper.times import Entry, Part
from qsync_fx.predictor.memory import OptimizerMemory, TrainingMemory as Held, step_memory
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.profiler.measurement import (
    GivenOptimizer,
    checked_precisions,
    optimizer_name,
    optimizer_of,
)
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.observed_step import observed, profile_plans
from qsync_fx.profiler.profile import Collective, Profile
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized
from qsync_fx.profiler.sensitivity.gradient_step import samples
from qsync_fx.profiler.timing.measured_memory import known_memory
from qsync_fx.profiler.timing.step_timers import StepFunction, TrainingStep, check_model, clock_for

_SIZES = tuple(2**power for power in range(16, 31))


def catalog_profile(
    device: Device | str | os.PathLike[str],
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    precisions: Sequence[str | Precision] | None = None,
    optimizer: GivenOptimizer | None = None,
) -> Profile:
    """Return the profile of a model on a catalog device, with computed instead of measured times.

    The step runs on this machine: twice with the model and, for a model on the CPU, twice without
    computing it, to measure the loss's memory.

    Args:
        device: from `qsync_fx.devices.get`, its name, or the path of a TOML file that describes it.
        model, step, optimizer: as for `qsync_fx.measure`.
        precisions: formats that plans may use; by default those that the device has units for, up
            to 32 bits.

    Raises:
        DeviceError: there is no such device.
        OptionError: an argument is invalid.
    """
    check_model(model)
    if not isinstance(device, Device):
        device = get(device)
    if precisions is None:
        formats = [fmt for fmt in FORMATS.values() if fmt.name in device.units and fmt.bits <= 32]
    else:
        formats = checked_precisions(precisions)
    updating = optimizer_of(unwrapped(model), optimizer)
    training = TrainingStep(
        step, batch, updating, lambda: model.zero_grad(set_to_none=True), clock_for(1)
    )
    # Times are for the sizes of this batch, even if the model was compiled for others.
    with (
        without_training(model, updating),
        internals.dynamo_config.patch(automatic_dynamic_shapes=False),
    ):
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
        # The target option is the profile's machine, not a condition of its times.
        replace(visited.model, options=""),
        stored(graph),
        [fmt.name for fmt in formats],
        [_run(label, item, times, seconds, live) for label, item in plans.items()],
        optimizer_name(updating),
        _collectives(device),
        optimizer_memory=memory,
        loss_memory=visited.loss,
        batch_size=samples(batch),
    )


def _run(
    label: str, result: States, times: DeviceTimes, optimizer: float, live: Held
) -> MeasuredRun:
    """Return the computed run of a plan; unscaled casts count as operator time, as measured."""
    step = scheduled(result, times)
    forward, backward = (_by_operator(entries) for entries in (step.forward, step.backward))
    quantized = _quantized(result, times)
    for item in quantized:
        forward[item.operator] -= item.seconds
    measured = [
        MeasuredOperator(op.id, *names, max(0.0, forward[op.id]), backward[op.id])
        for op, names in zip(result.graph.operators, result.names, strict=True)
    ]
    forward_s, backward_s = (
        sum(entry.seconds for entry in entries) for entries in (step.forward, step.backward)
    )
    steps = [(forward_s, backward_s, optimizer)]
    return MeasuredRun(label, steps, step_memory(result, live).step_bytes, measured, quantized)


def _by_operator(entries: Sequence[Entry]) -> dict[str, float]:
    result: dict[str, float] = defaultdict(float)
    for entry in entries:
        if entry.part is not Part.OUTSIDE:
            result[entry.operator] += entry.seconds
    return result


def _quantized(result: States, times: DeviceTimes) -> list[Quantized]:
    quantized = []
    for cast in result.casts:
        if FORMATS[cast.after].scaled:
            owner, value = result.graph.operators[cast.owner].id, result.graph.values[cast.value]
            call = owner, cast.before, cast.after, value.numel
            seconds = times.cast(*call, value.differentiated).forward
            quantized.append(Quantized(*call, backward=False, seconds=seconds))
    return quantized


def _collectives(device: Device) -> list[Collective]:
    def seconds(ranks: int) -> list[tuple[int, float]]:
        return [(size, device.allreduce_seconds(size, ranks)) for size in _SIZES]

    return [Collective("nccl", item.ranks, seconds(item.ranks)) for item in device.reductions]


def _moved(optimizer: Optimizer | None) -> float:
    """Return the FP32 bytes that an optimizer reads and writes per element of a parameter."""
    settings = getattr(optimizer, "defaults", {})
    states = int(bool(settings.get("momentum")))
    if "betas" in settings:
        states = 2
    return 4.0 * (3 + 2 * states)
