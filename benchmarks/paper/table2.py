"""QSync's Table II: which operators stay narrow, by several indicators, where memory is the same for all, and what accuracy comes of it.

A T4 of the catalog is short of memory beside a V100 that trains in FP32, and a step may take as long as it likes: what is recovered from
INT8, and how far, is the indicator's choice alone. "random" and "hessian" are the paper's own rivals, "paper" its formula, each with the
paper's search; "second_order" is our formula with that search, and "second_order, milp" with the exact allocator. Variance is what our
formula says of
all of them. Accuracy is that of training on a CPU, where FP16 is BF16: the mean over seeds, and its deviation.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from qsync_fx.allocator import PlanResult
from qsync_fx.allocator.baselines import HessianGreedy, RandomGreedy
from qsync_fx.allocator.evaluator import evaluate_plan
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.recovery import PrecisionRecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.devices import SLOW, Looked, capped, problem
from benchmarks.paper.support.experiment import OPTIONS, OnImages
from benchmarks.support.harness import arguments, show


def plans_of(known: Looked, batch: int) -> dict[str, PlanResult]:
    """Returns the plan of each indicator, under one limit of memory."""
    memory = capped(problem(known, batch))
    ours, theirs = (
        problem(known, batch, method, memory=memory) for method in ("second_order", "paper")
    )
    return {
        "random": RandomGreedy(0).allocate(ours),
        "hessian": HessianGreedy(known.sensitivities["hessian"]).allocate(ours),
        "paper": PrecisionRecovery().allocate(theirs),
        "second_order": PrecisionRecovery().allocate(ours),
        "second_order, milp": MilpAllocator().allocate(ours),
    }


def main() -> None:
    options = arguments(__doc__, None, **OPTIONS)
    experiment = OnImages(options)
    batch = experiment.images.size.batch
    for name, known in experiment.networks():
        asked = problem(known, batch, memory=capped(problem(known, batch)))
        for indicator, answer in plans_of(known, batch).items():
            plan, said = answer.plans[SLOW], evaluate_plan(asked, answer.plans)
            experiment.add(
                {
                    "network": name,
                    "indicator": indicator,
                    **experiment.row(name, indicator, plan, [batch, batch]),
                    "variance": said.variance,
                    "peak_mb": (said.classes[SLOW].peak_bytes or 0) / 1e6,
                    "allowed_mb": (asked.classes[SLOW].memory or 0) / 1e6,
                    "operators": dict(Counter(plan.values())),
                }
            )
    show(experiment.rows)


if __name__ == "__main__":
    main()
