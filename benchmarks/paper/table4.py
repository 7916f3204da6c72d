"""QSync's Tables IV and V: full precision, dynamic batch sizing, uniform precision and ours: accuracy, and steps a second.

ClusterA is a V100 that trains in FP32 and a T4 of the catalog; ClusterB's T4 is short of memory. Steps a second are those that the judge
foresees of the catalog's devices with the batches that are trained, for a network that is wide enough to fill them (`support.devices`); its
narrow image, which has the same operators, is what is trained. Uniform precision is the widest narrow one that fits, and ours has to
be as fast. "oracle" is FP32 on both, which no cluster is asked to hold. Accuracy is that of training on a CPU, where FP16 is BF16: the
mean over seeds, and its deviation.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qsync_fx.allocator import PlanResult, Problem
from qsync_fx.allocator.baselines import DynamicBatches, FullPrecision
from qsync_fx.allocator.evaluator import resized
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.predictor.memory import MOMENTUM, OptimizerMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.devices import SLOW, Looked, capped, problem, within
from benchmarks.paper.support.experiment import OPTIONS, OnImages
from benchmarks.plans.fleets import narrow
from benchmarks.support.harness import Row, arguments, show

Trained = Callable[[str, Mapping[str, str], Sequence[int]], Mapping[str, Any]]
"""From what it is called, a plan of the T4, and both batches, to the accuracy over all seeds."""


def answers(known: Looked, asked: Problem) -> Iterator[tuple[str, PlanResult]]:
    """Yields what each way of training makes of a cluster."""

    def other(name: str, batch: int) -> object:
        return resized(asked.classes[name], known.graphs[name], batch)

    uniform = narrow(asked)
    yield "oracle", FullPrecision().allocate(asked)
    yield "dynamic batches", DynamicBatches(other).allocate(asked)  # type: ignore[arg-type]
    yield "uniform", uniform
    yield "ours", MilpAllocator().allocate(within(asked, uniform.judged.seconds))


def rows(
    known: Looked, batch: int, train: Trained, optimizer: OptimizerMemory = MOMENTUM
) -> Iterator[Row]:
    """Yields how each way of training does on both clusters."""
    memory = capped(problem(known, batch, optimizer=optimizer))
    for cluster, allowed in (("A", None), ("B", memory)):
        for way, answer in answers(
            known, problem(known, batch, optimizer=optimizer, memory=allowed)
        ):
            plan, judged = answer.plans[SLOW], answer.judged
            batches = [device.batch or batch for device in answer.problem.cluster.devices.values()]
            yield {
                "cluster": cluster,
                "way": way,
                **train(f"{way} in {cluster}", plan, batches),
                "steps_per_second": None if way == "oracle" else 1 / judged.seconds,
                "variance": judged.variance,
                "batches": batches,
                "peak_mb": (judged.classes[SLOW].peak_bytes or 0) / 1e6,
                "allowed_mb": None if allowed is None else allowed / 1e6,
                "waiting_ms": {
                    device: 1e3 * found.waiting for device, found in judged.classes.items()
                },
                "operators": dict(Counter(plan.values())),
            }


def main() -> None:
    options = arguments(__doc__, None, **OPTIONS)
    experiment = OnImages(options)
    for name, known in experiment.networks():

        def train(
            what: str, plan: Mapping[str, str], batches: Sequence[int], name: str = name
        ) -> Mapping[str, Any]:
            return experiment.row(name, what, plan, batches)

        for row in rows(known, experiment.images.size.batch, train):
            experiment.add({"network": name, **row})
    show(experiment.rows)


if __name__ == "__main__":
    main()
