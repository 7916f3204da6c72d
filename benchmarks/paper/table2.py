"""QSync's Table II: plans of several indicators under one memory limit, and their accuracy.
The cluster is a V100 in FP32 and a memory-limited T4 of the catalog, without a limit on step time,
so the indicator alone selects the operators that are recovered from INT8, and their formats.
"random" and "hessian" are the paper's baselines and "paper" its indicator, each with the paper's
search; "second_order" is this project's indicator with that search, and "second_order, milp" with
the exact allocator. "variance" is estimated by "second_order" for all plans. "accuracy" is the mean
over seeds of training on a CPU, with BF16 for FP16, and "deviation" its standard deviation.
"peak_mb" and "allowed_mb" are the T4's predicted peak memory and its limit.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from qsync_fx.allocator import PlanResult
from qsync_fx.allocator.evaluator import evaluate_plan
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.recovery import PrecisionRecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.devices import SLOW, AnalyzedNetwork, capped, problem
from benchmarks.paper.support.experiment import OPTIONS, OnImages
from benchmarks.support.baselines import HessianGreedy, RandomGreedy
from benchmarks.support.harness import arguments, show


def plans_of(analyzed: AnalyzedNetwork, batch: int) -> dict[str, PlanResult]:
    """Return the plan of each indicator, under one memory limit."""
    memory = capped(problem(analyzed, batch))
    ours, theirs = (
        problem(analyzed, batch, method, memory=memory) for method in ("second_order", "paper")
    )
    return {
        "random": RandomGreedy(0).allocate(ours),
        "hessian": HessianGreedy(analyzed.sensitivities["hessian"]).allocate(ours),
        "paper": PrecisionRecovery().allocate(theirs),
        "second_order": PrecisionRecovery().allocate(ours),
        "second_order, milp": MilpAllocator().allocate(ours),
    }


def main() -> None:
    options = arguments(__doc__, None, **OPTIONS)
    experiment = OnImages(options)
    for name, analyzed in experiment.networks():
        batch = experiment.images(name).size.batch
        planning = problem(analyzed, batch, memory=capped(problem(analyzed, batch)))
        for indicator, answer in plans_of(analyzed, batch).items():
            plan, evaluation = answer.plans[SLOW], evaluate_plan(planning, answer.plans)
            experiment.add(
                {
                    "network": name,
                    "indicator": indicator,
                    **experiment.row(name, indicator, plan, [batch, batch]),
                    "variance": evaluation.variance,
                    "peak_mb": (evaluation.classes[SLOW].peak_bytes or 0) / 1e6,
                    "allowed_mb": (planning.classes[SLOW].memory or 0) / 1e6,
                    "operators": dict(Counter(plan.values())),
                }
            )
    show(experiment.rows)


if __name__ == "__main__":
    main()
