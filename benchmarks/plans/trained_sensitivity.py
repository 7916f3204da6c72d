"""Sensitivities of the simulated fleets' models, each trained on real data before.
A model of plans/fleet_models.py is trained with AdamW on small samples, and its sensitivity is then
measured by "second_order" on samples of the fleet's size, in the formats of a T4 and of an L4. The
sensitivities are written to --folder, from which joint_fleets.py reads them. Columns: "loss" is the
mean of the first and "trained loss" of the last tenth of the steps; "variance fp16", and so on, are
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

TARGETS = {"t4": ("fp16", "int8"), "l4": ("tf32", "bf16", "int8")}
"""Formats of the devices for which a sensitivity is measured."""
FOLDER_OPTION: dict[str, Any] = {
    "type": folder,
    "default": "runs/sensitivities",
    "help": "folder with the sensitivities of the trained models (%(default)s)",
}
BATCH = 32
STEPS = 4
"""Steps of the measurement, each with `Case.probed` samples."""


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


def measured(model: nn.Module, case: Case, steps: int, target: str = "t4") -> qsync_fx.Sensitivity:
    """Return the sensitivity of a model in the formats of a device in `TARGETS`."""
    return qsync_fx.sensitivity(
        model,
        lambda model, batch: model(**batch),
        [case.inputs(case.probed, seed) for seed in range(steps)],
        precisions=TARGETS[target],
        steps=steps,
        fraction=1.0,
        options={"target": target},
    )


def trained_sensitivity(name: str, case: Case, target: str, options: Any) -> qsync_fx.Sensitivity:
    """Return a trained model's sensitivity for the batches of a fleet.

    It is read from `options.folder`; with --quick, the model is trained for two steps instead.
    """
    if options.quick:
        return measured(trained(case, 2)[0], case, 1, target).at_batch(case.probed, case.batch)
    path = Path(options.folder) / f"{name}.{target}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run trained_sensitivity.py --only {name} first")
    return qsync_fx.Sensitivity.load(path).at_batch(case.probed, case.batch)


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "models whose names begin so", "default": None},
        steps={"type": int, "default": 200, "help": f"steps of {BATCH} samples (%(default)s)"},
        folder=FOLDER_OPTION,
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
    variance, noise = {}, None
    for target, formats in TARGETS.items():
        sensitivity = measured(model, case, by_size(options.quick, 1, STEPS), target)
        sensitivity.save(Path(options.folder) / f"{name}.{target}.json")
        noise = sensitivity.noise
        for fmt in formats:
            values = sensitivity.variance.values()
            variance[f"variance {fmt}, {target}"] = sum(by.get(fmt, 0.0) for by in values)
    part = max(steps // 10, 1)
    return {
        "model": name,
        "training": f"{steps} steps of {BATCH} samples of size {case.small}",
        "loss": statistics.fmean(losses[:part]),
        "trained loss": statistics.fmean(losses[-part:]),
        **variance,
        "noise": noise,
        "samples": case.probed,
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
