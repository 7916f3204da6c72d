"""Plans of each allocator for clusters of V100 and T4 from the catalog (QSync, section VII).
The clusters are the files cluster-a and cluster-b of qsync_fx: ClusterA has two servers of eight
V100 and two of eight T4; ClusterB limits a plan to 30% of a T4's memory. If uniform INT8 exceeds
this limit, ClusterB allows its peak plus 30% of the distance to uniform FP16's peak. The same
clusters with 256 servers of each kind show that the solve time depends on the number of
device classes, not on the number of devices. Step times are predicted. The uniform plan is the
widest narrow format that fits into memory, and plans must reach its step time. Columns:
"steps_per_second" at equal global batch, "variance" of the plan, "waiting_*" in seconds per step,
"peak_t4" and "allowed_t4" in bytes, "gap" to the lower bound, "found_in" in seconds, "why not"
names exceeded limits. Rows "orderings" say whether the paper's orderings of throughput (Tables IV
and V) are reproduced: ours >= uniform, ours >= dynamic batch sizing >= full precision.

Each model is traced once per device, with a symbolic batch size. Sensitivities are measured by
"second_order" on trained models (trained_sensitivity.py writes them to --folder).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import qsync_fx
from qsync_fx.allocator import PlanResult, Problem
from qsync_fx.allocator.api import get_allocator
from qsync_fx.allocator.baselines import DynamicBatches, Uniform
from qsync_fx.allocator.evaluator import resized
from qsync_fx.allocator.problem_builder import PlanRequest, build_problem
from qsync_fx.devices import get
from qsync_fx.errors import PlanError
from qsync_fx.formats import FORMATS as EVERY
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.memory import MOMENTUM, OptimizerMemory
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import Cluster, memory_size
from qsync_fx.profiler.model_graph_builder import build_model_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plans.fleet_models import CASES, QUICK, Case
from benchmarks.plans.trained_sensitivity import FOLDER_OPTION, trained_sensitivity
from benchmarks.support.baselines import FullPrecision
from benchmarks.support.harness import Row, arguments, by_size, finish, selected, write_cases

FORMATS = {"v100": ("fp32", "fp16"), "t4": ("fp32", "fp16", "int8")}
COUNTS = (16, 2048)
CLUSTERS = {"A": Cluster.load("cluster-a"), "B": Cluster.load("cluster-b")}
TRACED = 2
SLACK = 1e-9


@dataclass(frozen=True)
class CatalogProfile:
    """Graph, times and sensitivity of a model on a device, with the interface of a profile."""

    graph: ModelGraph
    device: str
    sensitivity: qsync_fx.Sensitivity
    precisions: tuple[str, ...]
    optimizer_memory: OptimizerMemory = MOMENTUM

    def times(self) -> DeviceTimes:
        return DeviceTimes(get(self.device), self.graph)


def symbolic(
    model: torch.nn.Module, case: Case, device: str, formats: tuple[str, ...]
) -> ModelGraph:
    """Return the graph of a model on a device, with a symbolic batch size."""
    torch._dynamo.reset()
    inputs = case.inputs(TRACED)
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 0)
    return build_model_graph(qsync_fx.explain(model, **inputs, options={"target": device}), formats)


def traced(case: Case) -> dict[str, ModelGraph]:
    """Return the graph of each device with a symbolic batch size."""
    torch.manual_seed(0)
    model = case.build().train()
    return {device: symbolic(model, case, device, FORMATS[device]) for device in FORMATS}


def problem(
    graphs: dict[str, ModelGraph],
    sensitivity: qsync_fx.Sensitivity,
    batch: int,
    count: int,
    memory: int | None,
) -> Problem:
    """Return the problem of a cluster whose limit on step time is the uniform plan's.

    `memory` limits a T4, in bytes; None allows all of its memory.
    """
    cluster = CLUSTERS["A"]
    devices = {
        name: replace(device, count=count, batch=batch) for name, device in cluster.devices.items()
    }
    settings: dict[str, Any] = {
        name: CatalogProfile(at_batch(graph, batch), name, sensitivity, FORMATS[name])
        for name, graph in graphs.items()
    }
    wishes = PlanRequest(
        memory={"t4": "100%" if memory is None else memory, "v100": "100%"}, target=float("inf")
    )
    free, _ = build_problem(replace(cluster, devices=devices), settings, wishes)
    uniform = narrow(free)
    return replace(free, seconds=uniform.evaluation.seconds) if uniform.fits else free


def allowed(planning: Problem) -> int:
    """Return the memory limit in bytes of a T4 plan in ClusterB."""
    limit = memory_size(CLUSTERS["B"].devices["t4"].memory or "100%")
    assert limit is not None and limit.share
    share = int(limit.amount * get("t4").memory.bytes)
    peaks = {
        fmt: Uniform(fmt).allocate(planning).evaluation.classes["t4"].peak_bytes or 0
        for fmt in ("fp16", "int8")
    }
    if peaks["int8"] <= share:
        return share
    return int(peaks["int8"] + limit.amount * (peaks["fp16"] - peaks["int8"]))


def narrow(planning: Problem) -> PlanResult:
    """Return the widest narrow uniform plan that fits into memory, else the narrowest."""
    formats = [fmt for fmt in FORMATS["t4"] if EVERY[fmt].bits < 32]
    results = [Uniform(fmt).allocate(planning) for fmt in formats]
    return next((answer for answer in results if answer.fits), results[-1])


def at_batch(graph: ModelGraph, batch: int) -> ModelGraph:
    (symbol,) = graph.symbols
    return graph.at(**{symbol: batch})


def answers(
    planning: Problem, graphs: dict[str, ModelGraph]
) -> Iterator[tuple[str, PlanResult | PlanError]]:
    """Yield each allocator's name with its plan or its error."""

    def other(name: str, batch: int) -> Any:
        return resized(planning.classes[name], graphs[name], batch)

    yield "uniform", narrow(planning)
    for allocator in (
        get_allocator("milp"),
        get_allocator("paper"),
        DynamicBatches(other),
        FullPrecision(),
    ):
        try:
            yield allocator.name, allocator.allocate(planning)
        except PlanError as error:
            yield allocator.name, error


def row(model: str, fleet: str, count: int, name: str, answer: PlanResult | PlanError) -> Row:
    if isinstance(answer, PlanError):
        return {
            "model": model,
            "cluster": fleet,
            "devices": 2 * count,
            "allocator": name,
            "why not": answer.what,
        }
    judged, over = answer.evaluation, answer.evaluation.exceeds(answer.problem)
    batches = [device.batch for device in answer.problem.cluster.devices.values()]
    t4 = judged.classes["t4"]
    return {
        "model": model,
        "cluster": fleet,
        "devices": 2 * count,
        "allocator": name,
        "steps_per_second": 1 / judged.seconds,
        "variance": judged.variance,
        "waiting_v100": judged.classes["v100"].waiting,
        "waiting_t4": t4.waiting,
        "peak_t4": t4.peak_bytes,
        "allowed_t4": answer.problem.classes["t4"].memory,
        "batches": "/".join(map(str, batches)),
        "gap": answer.gap,
        "found_in": answer.took,
        "why not": ", ".join(f"{limit} +{by:.3g}" for limit, by in over.items()) or None,
    }


def orderings(
    model: str, fleet: str, count: int, answers_by_name: dict[str, PlanResult | PlanError]
) -> Row:
    """Return a row of the paper's throughput orderings; None if a plan does not fit into memory."""

    def seconds(name: str) -> float | None:
        answer = answers_by_name[name]
        if isinstance(answer, PlanError) or any(
            "memory" in limit for limit in answer.evaluation.exceeds(answer.problem)
        ):
            return None
        return answer.evaluation.seconds

    def faster(first: str, second: str) -> bool | None:
        a, b = seconds(first), seconds(second)
        return None if a is None or b is None else a <= b * (1 + SLACK)

    pairs = [
        ("milp", "uniform"),
        ("paper", "uniform"),
        ("milp", "dynamic-batches"),
        ("dynamic-batches", "full-precision"),
    ]
    holds = {f"{first} >= {second}": faster(first, second) for first, second in pairs}
    ratios = {
        "model": model,
        "cluster": fleet,
        "devices": 2 * count,
        "allocator": "orderings",
        **holds,
    }
    ours = answers_by_name["milp"]
    if holds["milp >= dynamic-batches"] is False and isinstance(ours, PlanResult):
        waits = ours.evaluation.classes["v100"].waiting
        ratios["why not"] = (
            f"V100 in FP32 wait {waits:.3g} s for T4 in any format, which are quicker with fewer "
            "samples"
        )
    return ratios


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "models whose names begin so", "default": None},
        folder=FOLDER_OPTION,
    )
    rows: list[Row] = []
    # fig6.py covers the other quick case.
    for model, case in selected(
        options, by_size(options.quick, {"bert": QUICK["bert"]}, CASES)
    ).items():
        began = time.perf_counter()
        graphs, sensitivity = traced(case), trained_sensitivity(model, case, "t4", options)
        print(f"{model}: traced in {time.perf_counter() - began:.0f} s", flush=True)
        for count in COUNTS:
            unlimited = problem(graphs, sensitivity, case.batch, count, None)
            for fleet, memory in (("A", None), ("B", allowed(unlimited))):
                planning = problem(graphs, sensitivity, case.batch, count, memory)
                answers_by_name = dict(answers(planning, graphs))
                rows += [
                    row(model, fleet, count, name, answer)
                    for name, answer in answers_by_name.items()
                ]
                rows.append(orderings(model, fleet, count, answers_by_name))
                print(f"{model}: {fleet} with {2 * count} devices", flush=True)
        if options.json:
            write_cases(options.json, rows, quick=options.quick, by="model")
    finish(options, rows, by="model")


if __name__ == "__main__":
    main()
