"""QSync's Tables IV and V: accuracy and throughput of training methods on two clusters.
The methods are full precision, dynamic batch sizing, uniform precision and this project's plans.
ClusterA is a V100 in FP32 and a T4 of the catalog; ClusterB limits the T4's memory
(`capped`). Throughput is predicted for a wide network on the catalog's devices, and a narrow
network with the same operators is trained (paper/support/images.py). The uniform plan is the widest
narrow format that fits, and both of "ours" must reach its step time: one is of the paper's search,
the other of the exact allocator. "oracle" is FP32 on both ranks, regardless of limits. Columns:
"accuracy" is the mean over seeds of training on a CPU, with BF16 for FP16, and "deviation" its
standard deviation; "steps_per_second", "variance", "peak_mb" and "waiting_ms" are predicted;
"allowed_mb" is the memory limit; "batches" are the ranks' batch sizes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qsync_fx.allocator import PlanResult, Problem
from qsync_fx.allocator.baselines import DynamicBatches
from qsync_fx.allocator.evaluator import resized
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.recovery import PrecisionRecovery
from qsync_fx.predictor.memory import MOMENTUM, OptimizerMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.devices import SLOW, AnalyzedNetwork, capped, problem, within
from benchmarks.paper.support.experiment import OPTIONS, OnImages
from benchmarks.paper.support.images import NETWORKS, Network
from benchmarks.plans.fleets import narrow
from benchmarks.support.baselines import FullPrecision
from benchmarks.support.harness import Row, arguments, show

Trained = Callable[[str, Mapping[str, str], Sequence[int]], Mapping[str, Any]]
"""Function of a title, a T4 plan and both batch sizes that returns the accuracy over all seeds."""


def answers(analyzed: AnalyzedNetwork, planning: Problem) -> Iterator[tuple[str, PlanResult]]:
    """Yield the name and plan of each training method for a cluster."""

    def other(name: str, batch: int) -> object:
        return resized(planning.classes[name], analyzed.graphs[name], batch)

    uniform = narrow(planning)
    yield "oracle", FullPrecision().allocate(planning)
    yield "dynamic batches", DynamicBatches(other).allocate(planning)  # type: ignore[arg-type]
    yield "uniform", uniform
    limited = within(planning, uniform.evaluation.seconds)
    yield "ours, paper's search", PrecisionRecovery().allocate(limited)
    yield "ours", MilpAllocator().allocate(limited)


def rows(
    analyzed: AnalyzedNetwork, batch: int, train: Trained, optimizer: OptimizerMemory = MOMENTUM
) -> Iterator[Row]:
    """Yield one row per cluster and training method."""
    unlimited = problem(analyzed, batch, optimizer=optimizer)
    for cluster, allowed in {"A": None, "B": capped(unlimited)}.items():
        for method, answer in answers(
            analyzed, problem(analyzed, batch, optimizer=optimizer, memory=allowed)
        ):
            plan, judged = answer.plans[SLOW], answer.evaluation
            batches = [device.batch or batch for device in answer.problem.cluster.devices.values()]
            yield {
                "cluster": cluster,
                "method": method,
                **train(f"{method} in {cluster}", plan, batches),
                "steps_per_second": None if method == "oracle" else 1 / judged.seconds,
                "variance": judged.variance,
                "batches": batches,
                "peak_mb": (judged.classes[SLOW].peak_bytes or 0) / 1e6,
                "allowed_mb": None if allowed is None else allowed / 1e6,
                "waiting_ms": {
                    device: 1e3 * metrics.waiting for device, metrics in judged.classes.items()
                },
                "operators": dict(Counter(plan.values())),
            }


def main(description: str | None, networks: Mapping[str, Network]) -> None:
    options = arguments(description, None, **OPTIONS)
    experiment = OnImages(options, networks)
    for name, analyzed in experiment.networks():

        def train(
            label: str, plan: Mapping[str, str], batches: Sequence[int], name: str = name
        ) -> Mapping[str, Any]:
            return experiment.row(name, label, plan, batches)

        for row in rows(analyzed, experiment.images(name).size.batch, train):
            experiment.add({"network": name, **row})
    show(experiment.rows)


if __name__ == "__main__":
    main(__doc__, NETWORKS)
