"""Sensitivities of the simulated fleets' models, each trained on real data before.
A model of plans/fleet_models.py is trained with AdamW on small samples, and its sensitivity is then
measured by "second_order" on samples of the fleet's size, in the formats of a T4. The sensitivities
are written to --folder; plans/fleets.py does not read them yet. Columns: "loss" is the mean of the
first and "trained loss" of the last tenth of the steps; "variance fp16" and "variance int8" are
variances of the uniform plans, "noise" is the exact gradient's variance between batches; "seconds"
is the duration of training and measurement.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plans.fleet_models import CASES, QUICK, Case
from benchmarks.support.harness import Row, arguments, by_size, finish, folder, selected

NARROW = ("fp16", "int8")
BATCH = 32
SAMPLES, STEPS = 2, 4
"""Samples of a step of the measurement, and its number of steps."""


def trained(case: Case, steps: int, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """Return the trained model and the loss of each step."""
    torch.manual_seed(seed)
    model = case.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), case.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, case.rate, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(**case.draw(BATCH, case.small, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def measured(model: nn.Module, case: Case, steps: int) -> qsync_fx.Sensitivity:
    """Return the sensitivity of a model in the formats of a T4."""
    return qsync_fx.sensitivity(
        model,
        lambda model, batch: model(**batch),
        [case.inputs(SAMPLES, seed) for seed in range(steps)],
        precisions=NARROW,
        steps=steps,
        fraction=1.0,
        options={"target": "t4"},
    )


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "models whose names begin so", "default": None},
        steps={"type": int, "default": 200, "help": f"steps of {BATCH} samples"},
        folder={"type": folder, "default": "runs/sensitivities", "help": "where they are written"},
    )
    rows: list[Row] = []
    for name, case in selected(options, by_size(options.quick, QUICK, CASES)).items():
        rows.append(row(name, case, options))
        print(rows[-1], flush=True)
    finish(options, rows)


def row(name: str, case: Case, options: Any) -> Row:
    steps = by_size(options.quick, 2, options.steps)
    began = time.perf_counter()
    model, losses = trained(case, steps)
    sensitivity = measured(model, case, by_size(options.quick, 1, STEPS))
    sensitivity.save(Path(options.folder) / f"{name}.json")
    part = max(steps // 10, 1)
    variance = {
        f"variance {fmt}": sum(values.get(fmt, 0.0) for values in sensitivity.variance.values())
        for fmt in NARROW
    }
    return {
        "model": name,
        "training": f"{steps} steps of {BATCH} samples of size {case.small}",
        "loss": statistics.fmean(losses[:part]),
        "trained loss": statistics.fmean(losses[-part:]),
        **variance,
        "noise": sensitivity.noise,
        "samples": SAMPLES,
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
