"""QSync's Fig. 8: rank of each operator's sensitivity over the first 50 updates of a training.
Three networks train on scikit-learn's digits: a ViT (instead of BERT), a CNN with batch norm
(instead of ResNet50), and an MLP with ReLU. A plan is derived from these updates, so the ranks must
be stable. "kept" is the mean Spearman correlation of the ranks of consecutive updates, and "early"
the correlation of the mean sensitivity of the first ten updates with the last ten. The file
contains the ranks of each operator by update; 0 is the most sensitive.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity, spearman
from qsync_fx.profiler.sensitivity.estimate import several

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.sensitivity import NETWORKS, digits, loss
from benchmarks.support.harness import Row, arguments, by_size, show, write_json

CASES = ("ViT", "convolutions, batch norm, ReLU", "perceptron, ReLU")
METHODS = ("second_order", "paper")
PRECISION = "int8"


def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mean(sensitivity: Sensitivity, first: int, last: int) -> list[float]:
    """Return the mean sensitivity of each operator over a range of updates."""
    trace = sensitivity.trace[first:last]
    return [
        statistics.fmean(values[name][PRECISION] for values in trace)
        for name in sensitivity.operators
    ]


def rank_correlation(sensitivity: Sensitivity) -> float:
    ranks = [list(step.values()) for step in ordered(sensitivity)]
    return statistics.fmean(spearman(a, b) for a, b in pairwise(ranks))


def ordered(sensitivity: Sensitivity) -> list[dict[str, int]]:
    """Return each operator's rank in each update, 0 for the most sensitive, in execution order."""
    result = []
    for values in sensitivity.trace:
        order = sorted(values, key=lambda name: -values[name][PRECISION])
        ranks = {name: rank for rank, name in enumerate(order)}
        result.append({name: ranks[name] for name in sensitivity.operators})
    return result


def case(name: str, updates: int) -> tuple[list[Row], list[Row]]:
    """Return one summary row per method, and the ranks of each operator."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, few = NETWORKS[name](), max(1, updates // 5)
    estimates = several(model, loss, digits(18, 96), METHODS, [PRECISION], updates, 0.5, optimizer)
    rows: list[Row] = []
    for estimate in estimates:
        early = spearman(mean(estimate, 0, few), mean(estimate, -few, updates))
        rows.append(
            {
                "case": name,
                "method": estimate.method,
                "updates": updates,
                "kept": rank_correlation(estimate),
                "early": early,
            }
        )
    ranks: list[Row] = [
        {
            "case": name,
            "method": estimate.method,
            "operator": operator,
            "ranks": [step[operator] for step in ordered(estimate)],
        }
        for estimate in estimates
        for operator in estimate.operators
    ]
    return rows, ranks


def main() -> None:
    options = arguments(
        __doc__, only={"nargs": "*", "metavar": "CASE", "help": "these networks alone"}
    )
    summary: list[Row] = []
    every: list[Row] = []
    for name in options.only or (by_size(options.quick, CASES[-1:], CASES)):
        rows, ranks = case(name, by_size(options.quick, 3, 50))
        summary, every = [*summary, *rows], [*every, *ranks]
        if options.json:
            write_json(options.json, [*summary, *every], options.quick)
    show(summary)


if __name__ == "__main__":
    main()
