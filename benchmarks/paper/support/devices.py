"""Allocation problems for a V100 in FP32 and a T4 in FP16 or INT8, both from the device catalog.

A CPU trains the plans, with BF16 instead of FP16 (`trained`): BF16 has fewer mantissa bits and
needs no loss scaling. In a network that a CPU trains in seconds, FP16 on a T4 is no faster than
FP32, and a plan has no trade-off. A plan can therefore be made for a wide network and trained in a
narrow one.

Invariant: seconds and bytes are predictions for the planned network at the trained batch size;
variance and accuracy belong to the trained network. Both have the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import qsync_fx
from benchmarks.plans.fleets import CLUSTERS, FORMATS, CatalogProfile
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
"""Memory limit of ClusterB's T4, between the peaks of uniform INT8 (0) and uniform FP16 (1),
or of FP16 and FP32; see `capped`.

A share of the device memory would not bind for small networks.
"""


@dataclass(frozen=True)
class AnalyzedNetwork:
    """Graphs and sensitivities of a network.

    Attributes:
        graphs: of the planned network by device name, with a symbolic batch size.
        sensitivities: of the trained network, by method.
    """

    graphs: Mapping[str, ModelGraph]
    sensitivities: Mapping[str, qsync_fx.Sensitivity]


def analyze(
    model: nn.Module,
    planned: nn.Module,
    step: Any,
    batches: Sequence[Any],
    inputs: Sequence[Tensor],
    methods: Sequence[str],
) -> AnalyzedNetwork:
    """Trace the planned network and estimate the sensitivities of the trained one.

    Args:
        inputs: of the planned network's forward; dimension 0 is the batch.

    Raises:
        ValueError: the two networks have different operators.
    """
    graphs = {}
    for device, formats in FORMATS.items():
        torch._dynamo.reset()
        marked = [tensor.clone() for tensor in inputs]
        for tensor in marked:
            torch._dynamo.mark_dynamic(tensor, 0)
        graphs[device] = build_model_graph(
            qsync_fx.explain(planned, *marked, options={"target": device}), formats
        )
    torch._dynamo.reset()
    options: dict[str, object] = {"target": SLOW}
    estimates = several(model, step, batches, methods, NARROW, len(batches), options=options)
    torch._dynamo.reset()
    adjustable = {
        operator.id for operator in graphs[SLOW].operators if operator.kind == "adjustable"
    }
    for estimate in estimates:
        if estimate.variance.keys() != adjustable:
            different = sorted(adjustable ^ estimate.variance.keys())
            raise ValueError(
                f"the trained network and the planned one have different operators: {different}"
            )
    return AnalyzedNetwork(graphs, {estimate.method: estimate for estimate in estimates})


def problem(
    analyzed: AnalyzedNetwork,
    batch: int,
    method: str = "second_order",
    optimizer: OptimizerMemory = MOMENTUM,
    memory: float | None = None,
) -> Problem:
    """Return the problem of two ranks with `batch` samples each and no limit on step time.

    `memory` limits the T4's peak memory, in bytes.
    """
    devices = {name: ClusterDevice(device=name, batch=batch) for name in FORMATS}
    profiles: dict[str, Any] = {}
    for name, graph in analyzed.graphs.items():
        (symbol,) = graph.symbols
        profiles[name] = CatalogProfile(
            graph.at(**{symbol: batch}),
            name,
            analyzed.sensitivities[method],
            FORMATS[name],
            optimizer,
        )
    wishes = PlanRequest(memory=None if memory is None else {SLOW: memory}, target=float("inf"))
    result, _ = build_problem(Cluster(devices, CLUSTERS["A"].network), profiles, wishes)
    return result


def capped(planning: Problem, share: float = CAP) -> float:
    """Return the bytes at `share` of the way from uniform INT8's peak memory to uniform FP16's.

    If INT8 needs no less memory, as in a small BERT, it is the way from FP16's to FP32's.
    """
    fp32, fp16, int8 = (
        evaluate_plan(planning, planning.uniform(fmt)).classes[SLOW].peak_bytes or 0
        for fmt in FORMATS[SLOW]
    )
    low, high = (int8, fp16) if int8 < fp16 else (fp16, fp32)
    return low + share * (high - low)


def within(planning: Problem, seconds: float | None) -> Problem:
    """Return the problem with `seconds` as its limit on step time."""
    return replace(planning, seconds=seconds)


def trained(plan: Mapping[str, str]) -> Plan:
    """Return the plan for training on a CPU: FP16 becomes BF16."""
    return Plan(operators={op: "bf16" if fmt == "fp16" else fmt for op, fmt in plan.items()})
