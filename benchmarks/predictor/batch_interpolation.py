"""Error of predicted step times and peaks at batch sizes that were not measured for the profile.
A model is measured at three batch sizes in FP32 and BF16; the profile is then interpolated at two
sizes between them, and continued to one beyond, which are measured as well. "predicted_ms" is the
cost mapper's forward and backward pass of the uniform plan, "scaled_ms" that of the nearest
measured size, scaled by operations and bytes as without further measurements. "peak_error_%" is
the error of the interpolated peak of the run. "fit_%" is the error at a measured size, where only
the correction to times that grow with the batch matters. All sizes are measured in the same rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import qsync_fx
from qsync_fx import Plan, Profile
from qsync_fx.allocator.evaluator import Scaled
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.profiler.batch_interpolation import measurements

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import QUICK, Case, ResNet18, bert, classifier, predicted
from benchmarks.support.harness import Row, arguments, by_size, finish, selected, write_cases

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Sizes:
    """Batch sizes of the profile, and those to predict: two within and one beyond."""

    model: Callable[[], Case]
    measured: tuple[int, int, int]
    predicted: tuple[int, int, int]


CASES: Mapping[str, Sizes] = {
    "BERT 2 layers, 128 tokens": Sizes(lambda: bert(2, 4, 128), (2, 4, 8), (3, 6, 12)),
    "ResNet-18, 64 x 64": Sizes(lambda: classifier(ResNet18(), 16, 64), (4, 16, 32), (8, 24, 48)),
}
SMALL: Mapping[str, Sizes] = {
    name: Sizes(build, (2, 4, 8), (3, 6, 12)) for name, build in QUICK.items()
}


def rows_of(name: str, sizes: Sizes, rounds: int) -> list[Row]:
    case = sizes.model()
    every = qsync_fx.measure(
        case.model,
        case.step,
        [case.batch],
        PRECISIONS,
        optimizer=case.optimizer,
        batch_sizes=(*sizes.measured, *sizes.predicted),
        repeats=rounds,
        sensitivity=None,
    )
    other = [item for item in every.batches if item.batch_size in sizes.measured]
    profile = replace(every, batches=other)
    rows: list[Row] = []
    for item in measurements(every):
        at_size, plans = profile.at_batch(item.batch_size), set(PRECISIONS)
        for run in (run for run in item.runs if run.label in plans):
            seconds = predicted(at_size, Plan.uniform(run.label))
            row: dict[str, Any] = {
                "case": name,
                "batch": item.batch_size,
                "method": run.label,
                "passes_ms": 1e3 * run.passes,
                "predicted_ms": 1e3 * seconds,
            }
            error = 100 * (seconds / run.passes - 1)
            if item.batch_size in sizes.measured:
                rows.append({**row, "fit_%": error})
                continue
            scaled = from_nearest(profile, at_size, Plan.uniform(run.label))
            (peak,) = (like.peak_bytes for like in at_size.runs if like.label == run.label)
            row["kind"] = "within" if item.batch_size < max(sizes.measured) else "beyond"
            row["error_%"] = error
            row["scaled_ms"] = 1e3 * scaled
            row["scaled_error_%"] = 100 * (scaled / run.passes - 1)
            row["peak_error_%"] = 100 * (peak / run.peak_bytes - 1) if run.peak_bytes else None
            rows.append(row)
    return rows


def from_nearest(profile: Profile, at_size: Profile, plan: Plan) -> float:
    """Return the seconds of both passes, scaled from the nearest measured batch size."""
    batch = at_size.batch_size or 0
    nearest = min(measurements(profile), key=lambda item: abs(item.batch_size - batch))
    alone = replace(profile, stored=nearest.stored, runs=nearest.runs, batches=[])
    times = Scaled(alone.times(), alone.graph, at_size.graph)
    totals = CostMapper(at_size.graph, times, plan).totals
    return totals.seconds - totals.optimizer


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "one case: bert, resnet"},
        rounds={"type": int, "default": 9, "help": "turns a plan (%(default)s)"},
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    for name, sizes in selected(options, by_size(options.quick, SMALL, CASES)).items():
        rows += rows_of(name, sizes, by_size(options.quick, 2, options.rounds))
        if options.json:
            # A case takes minutes: write its rows before the next one starts.
            write_cases(options.json, rows, quick=options.quick)
        torch._dynamo.reset()
    finish(options, rows, by="case")


if __name__ == "__main__":
    main()
