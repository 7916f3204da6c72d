"""Accuracy of sensitivity indicators for a ResNet-18 and a BERT-small in full size.
Both have the widths and depths of their publications. They are trained on real data before
(plans/fleet_models.py: ResNet-18 on images of 64 x 64, BERT-small with four layers of width 512 on
texts of 64 words) and train on between measured steps. Columns are as in sensitivity.py.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plans.fleet_models import QUICK, Case, bert, images, questions, resnet
from benchmarks.plans.trained_sensitivity import trained
from benchmarks.predictor.sensitivity import compared
from benchmarks.support.harness import Row, arguments, by_size, selected, show, write_cases

METHODS = ("second_order", "injected", "depth", "paper", "monte_carlo")
STEPS = {"int8": 6, "bf16": 8}
"""Measured steps by precision."""
CASES = {
    "ResNet-18": Case(
        lambda: resnet([2, 2, 2, 2], [64, 128, 256, 512], "basic"),
        images("pixel_values"),
        size=64,
        batch=16,
        small=64,
        rate=1e-3,
    ),
    "BERT-small": Case(
        functools.partial(bert, 4, 512), questions, size=64, batch=8, small=64, rate=1e-4
    ),
}


def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "networks whose names begin so", "default": None},
        steps={"type": int, "default": 200, "help": "of training before (%(default)s)"},
    )
    rows: list[Row] = []
    for name, case in selected(options, by_size(options.quick, QUICK, CASES)).items():
        model, losses = trained(case, by_size(options.quick, 2, options.steps))
        print(f"{name}: loss {losses[0]:.2f} before, {losses[-1]:.2f} after", flush=True)
        for precision in by_size(options.quick, ("int8",), STEPS):
            torch._dynamo.reset()
            steps = by_size(options.quick, 2, STEPS[precision])
            row = compared(
                model,
                lambda model, batch: model(**batch),
                [case.inputs(case.batch, seed) for seed in range(steps)],
                METHODS,
                precision,
                steps=steps,
                optimizer=optimizer,
            )
            rows.append({"case": name, **row})
            print({key: value for key, value in row.items() if key != "each"}, flush=True)
            if options.json:
                write_cases(options.json, rows, options.quick)
    show([{key: value for key, value in row.items() if key != "each"} for row in rows])


if __name__ == "__main__":
    main()
