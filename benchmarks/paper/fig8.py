"""QSync's Fig. 8: the rank of each operator's sensitivity over the first 50 updates of a training.

Three networks on scikit-learn's digits, from their first update on: a ViT of transformers (in the place of BERT), convolutions with batch
norm (in that of ResNet50), and a perceptron of ReLUs. A plan is chosen from what is seen in these updates, so ranks must last: "kept" is
the mean correlation of the ranks of an update with those of the next, "early" that of the mean of the first ten with that of the last ten.
Rows hold the ranks, 0 for the most sensitive.
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
from benchmarks.support.harness import Row, arguments, show, write_json

CASES = ("ViT", "convolutions, batch norm, ReLU", "perceptron, ReLU")
METHODS = ("second_order", "paper")
PRECISION = "int8"


def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mean(found: Sensitivity, first: int, last: int) -> list[float]:
    """Returns the mean over some updates of each operator."""
    trace = found.trace[first:last]
    return [
        statistics.fmean(values[name][PRECISION] for values in trace) for name in found.operators
    ]


def kept(found: Sensitivity) -> float:
    ranks = [list(step.values()) for step in ordered(found)]
    return statistics.fmean(spearman(a, b) for a, b in pairwise(ranks))


def ordered(found: Sensitivity) -> list[dict[str, int]]:
    """Returns the ranks of each update, operators in the order in which they run."""
    return [{name: ranks[name] for name in found.operators} for ranks in found.ranks(PRECISION)]


def case(name: str, updates: int) -> tuple[list[Row], list[Row]]:
    """Returns a summary of each method, and the ranks of each operator."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, few = NETWORKS[name](), max(1, updates // 5)
    found = several(model, loss, digits(18, 96), METHODS, [PRECISION], updates, 0.5, optimizer)
    rows: list[Row] = []
    for one in found:
        early = spearman(mean(one, 0, few), mean(one, -few, updates))
        rows.append(
            {
                "case": name,
                "method": one.method,
                "updates": updates,
                "kept": kept(one),
                "early": early,
            }
        )
    ranks: list[Row] = [
        {
            "case": name,
            "method": one.method,
            "operator": operator,
            "ranks": [step[operator] for step in ordered(one)],
        }
        for one in found
        for operator in one.operators
    ]
    return rows, ranks


def main() -> None:
    options = arguments(
        __doc__, only={"nargs": "*", "metavar": "CASE", "help": "these networks alone"}
    )
    summary: list[Row] = []
    every: list[Row] = []
    for name in options.only or (CASES[-1:] if options.quick else CASES):
        rows, ranks = case(name, 3 if options.quick else 50)
        summary, every = [*summary, *rows], [*every, *ranks]
        if options.json:
            write_json(options.json, [*summary, *every], options.quick)
    show(summary)


if __name__ == "__main__":
    main()
