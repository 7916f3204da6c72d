"""A V100 that trains in FP32 and a T4 that may take FP16 and INT8, of the catalog: what is asked of allocators, and what plans cost there.

A CPU trains the plans: FP16 becomes BF16 there (`trained`), which has fewer bits of mantissa and needs no scale of the loss. What it trains
in minutes is too narrow for a GPU, where a T4 is no quicker in FP16 than in FP32, so that there would be nothing to choose: a plan is made
for a wide network of the same operators, and trained in the narrow one.

Invariant: seconds and bytes are the catalog's, of the wide network with batches that are trained; variance and accuracy are of what is
trained. Both networks have the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import qsync_fx
from benchmarks.plans.fleets import FORMATS, NETWORK, Known
from qsync_fx import Plan
from qsync_fx.allocator import Problem
from qsync_fx.allocator.evaluator import evaluate_plan
from qsync_fx.allocator.problem_builder import PlanRequest, build_problem
from qsync_fx.formats import FORMATS as EVERY
from qsync_fx.predictor.memory import MOMENTUM, OptimizerMemory
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.sensitivity.estimate import several

NARROW = tuple(fmt for fmt in FORMATS["t4"] if EVERY[fmt].bits < 32)
SLOW = "t4"
CAP = 0.3
"""What ClusterB's T4 may hold: this share of the way from what uniform INT8 holds to what uniform FP16 does. Small networks fill no T4."""


@dataclass(frozen=True)
class Looked:
    """A model as it was looked at.

    Attributes:
        graphs: as each device runs what is planned for, its batch a symbol.
        sensitivities: of what is trained, by the method that found them.
    """

    graphs: Mapping[str, ModelGraph]
    sensitivities: Mapping[str, qsync_fx.Sensitivity]


def looked(
    model: nn.Module,
    wide: nn.Module,
    step: Any,
    batches: Sequence[Any],
    inputs: Sequence[Tensor],
    methods: Sequence[str],
) -> Looked:
    """Looks at a model and at the wide one of the same operators; `inputs` are those of its forward, their first dimension the batch.

    Raises:
        ValueError: they have other operators.
    """
    graphs = {}
    for device, formats in FORMATS.items():
        torch._dynamo.reset()
        marked = [tensor.clone() for tensor in inputs]
        for tensor in marked:
            torch._dynamo.mark_dynamic(tensor, 0)
        graphs[device] = build_model_graph(
            qsync_fx.explain(wide, *marked, options={"target": device}), formats
        )
    torch._dynamo.reset()
    options: dict[str, object] = {"target": SLOW}
    found = several(model, step, batches, methods, NARROW, len(batches), options=options)
    torch._dynamo.reset()
    asked = {operator.id for operator in graphs[SLOW].operators if operator.kind == "adjustable"}
    for one in found:
        if one.variance.keys() != asked:
            different = sorted(asked ^ one.variance.keys())
            raise ValueError(
                f"the network that is trained and the wide one have other operators: {different}"
            )
    return Looked(graphs, {one.method: one for one in found})


def problem(
    known: Looked,
    batch: int,
    method: str = "second_order",
    optimizer: OptimizerMemory = MOMENTUM,
    memory: float | None = None,
) -> Problem:
    """Returns the problem of two ranks with as many samples each, its T4 limited in memory, without a limit of seconds."""
    devices = {name: ClusterDevice(device=name, batch=batch) for name in FORMATS}
    profiles: dict[str, Any] = {}
    for name, graph in known.graphs.items():
        (symbol,) = graph.symbols
        profiles[name] = Known(
            graph.at(**{symbol: batch}), name, known.sensitivities[method], FORMATS[name], optimizer
        )
    wishes = PlanRequest(memory=None if memory is None else {SLOW: memory}, target=float("inf"))
    found, _ = build_problem(Cluster(devices, NETWORK), profiles, wishes)
    return found


def capped(asked: Problem, share: float = CAP) -> float:
    """Returns the bytes at a share of the way from what uniform INT8 takes to what uniform FP16 does."""
    low, high = (
        evaluate_plan(asked, asked.uniform(fmt)).classes[SLOW].peak_bytes or 0
        for fmt in reversed(NARROW)
    )
    return low + share * (high - low)


def within(asked: Problem, seconds: float | None) -> Problem:
    """Returns the problem where a step takes no longer."""
    return replace(asked, seconds=seconds)


def trained(plan: Mapping[str, str]) -> Plan:
    """Returns the plan as a CPU trains it: FP16 becomes BF16."""
    return Plan(operators={op: "bf16" if fmt == "fp16" else fmt for op, fmt in plan.items()})
