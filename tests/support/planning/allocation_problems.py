"""Allocation problems of one device or a fleet, with random times and sensitivities."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from qsync_fx.allocator import DeviceClass, Problem
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.times import TOLD_BY_NONE, Seconds
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.memory import ADAM, TrainingMemory
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_graph import StateNames
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network
from tests.support.planning.predicted_models import DrawnTimes, graph_of

THREE = ("fp32", "bf16", "int8")


def drawn_sensitivity(graph: ModelGraph, seed: int = 0) -> Sensitivity:
    """Return random variances: lognormal over operators, and larger for formats of fewer bits."""
    draw = random.Random(f"sensitivity {seed}")
    scale = {
        "bf16": 0.02,
        "fp16": 0.004,
        "tf32": 0.003,
        "int8": 1.0,
        "int8_grad": 1.6,
        "fp8": 0.8,
        "fp8_e5m2": 1.2,
    }
    variance: dict[str, dict[str, float]] = {}
    for operator in graph.operators:
        if operator.kind == "adjustable":
            base = draw.lognormvariate(0, 2)
            variance[operator.id] = {
                fmt: base * share * draw.uniform(0.8, 1.2) for fmt, share in scale.items()
            }
    return Sensitivity("drawn", "model", variance)


def device_class(
    name: str, formats: tuple[str, ...] = THREE, seed: int = 0, times: type[DrawnTimes] = DrawnTimes
) -> DeviceClass:
    """Return a device class that trains a model of `predicted_models`."""
    graph = graph_of(name)
    training = TrainingMemory(ADAM, buckets=True)
    return DeviceClass(
        graph, times(seed), drawn_sensitivity(graph, seed), formats, training=training
    )


class PlainTimes(DrawnTimes):
    """Times independent of neighbours and owners of casts, as in the integer linear program."""

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        return self._drawn(operator, str(state))

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        return TOLD_BY_NONE

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        return super().cast("", before, after, numel, differentiated)


class OwnedTimes(PlainTimes):
    """Times independent of neighbours, but not of the owners of casts."""

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        return DrawnTimes.cast(self, operator, before, after, numel, differentiated)


def alone(
    name: str, formats: tuple[str, ...] = THREE, seed: int = 0, times: type[DrawnTimes] = DrawnTimes
) -> Problem:
    """Return a problem of one device without memory or time limits."""
    return Problem(
        {"device": device_class(name, formats, seed, times)}, Cluster({"device": ClusterDevice()})
    )


def fleet(
    name: str, formats: tuple[str, ...] = THREE, seed: int = 0, times: type[DrawnTimes] = DrawnTimes
) -> Problem:
    """Return a problem of two fixed FP32 devices and two slower planned devices, small buckets."""
    slow = device_class(name, formats, seed, times)
    fast = replace(slow, times=times(seed + 1), fixed_plan=slow.uniform("fp32"))
    slower = ClusterDevice(count=2, slowdown=1.5, delay=1e-4, batch=4, copies=3e-8)
    devices = {"fast": ClusterDevice(count=2, batch=4, copies=1e-8), "slow": slower}
    cluster = Cluster(devices, Network(1e7, 1e-5, busy=0.4), Buckets(first_bytes=64, bytes=256))
    return Problem({"fast": fast, "slow": slow}, cluster)
