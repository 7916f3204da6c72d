"""Time to measure a profile of BERT-base with its sensitivity, and the estimate printed before.
The model has 12 layers; a batch is 4 texts of 128 tokens. The plans are FP32, BF16 and INT8, with
AdamW. Each case runs in its own process: the first compiles all plans with cold torch caches, for
one round and without sensitivity; the second measures the full profile with warm caches. Columns:
"minutes" is the measured time, the bracketed minutes are the estimate (a range if it includes the
sensitivity), "steps" is the number of timed steps; "sensitivity_steps" and "sensitivity_minutes"
are the sensitivity's part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qsync_fx
from benchmarks.support.harness import Row, arguments, by_size, finish
from qsync_fx.diagnostics.model_state import without_training
from qsync_fx.formats import precisions
from qsync_fx.profiler.measurement import (
    REPEATS,
    estimated_seconds,
    sensitivity_seconds,
    step_count,
)
from qsync_fx.profiler.observed_step import observed, profile_plans
from qsync_fx.profiler.timing.step_timers import TrainingStep, clock_for

PRECISIONS = ("fp32", "bf16", "int8")
BATCHES = 50


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--measure":
        print(json.dumps(measured(**json.loads(sys.argv[2]))))
        return
    options = arguments(__doc__)
    layers = by_size(options.quick, 1, 12)
    rows: list[Row] = []
    for case, settings in (
        ("compiled again, one turn, no sensitivity", {"repeats": 1, "sensitivity": None}),
        ("compiled before", {}),
    ):
        print(f"{layers} layers: {case}", flush=True)
        job = json.dumps({"layers": layers, "threads": options.threads, "settings": settings})
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", job]
        done = subprocess.run(command, check=True, text=True, capture_output=True)
        result = json.loads(done.stdout.splitlines()[-1])
        rows.append({"case": case, "layers": layers, **result})
    finish(options, rows)


def estimated_minutes(
    model: Any, training: TrainingStep, repeats: int, sensitivity: str | None
) -> list[float]:
    """Return the estimate before a measurement: without caches, or with caches a range."""
    formats = precisions(PRECISIONS)
    with without_training(model, training.optimizer):
        step = observed(model, training, {})
        plans = len(profile_plans(step.explanation, formats))
    steps_s = step_count(plans, repeats) * step.seconds.full
    cached_s, new_s = estimated_seconds(step, plans, steps_s)
    if sensitivity is None:
        return [round(new_s / 60, 1)]
    more = sensitivity_seconds(step, sensitivity, len(formats))
    return [round((cached_s + more_s) / 60, 1) for more_s in more]


def measured(layers: int, threads: int, settings: dict[str, Any]) -> Row:
    """Measure a profile in this process, and return a row with its duration."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=layers, num_labels=2))
    batches = [
        {"input_ids": torch.randint(30000, (4, 128)), "labels": torch.randint(2, (4,))}
        for _ in range(BATCHES)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    training = TrainingStep(step, batches[0], optimizer, model.zero_grad, clock_for(threads))
    repeats, method = settings.get("repeats", REPEATS), settings.get("sensitivity", "second_order")
    estimate = estimated_minutes(model, training, repeats, method)
    begin = time.perf_counter()
    profile = qsync_fx.measure(model, step, batches, PRECISIONS, optimizer=optimizer, **settings)
    minutes = (time.perf_counter() - begin) / 60
    sensitivity = profile.sensitivity
    steps = sum(len(run.steps) for run in profile.runs)
    row: dict[str, Any] = {"minutes": minutes, "steps": steps, "predicted_minutes": estimate}
    if sensitivity is not None:
        row["sensitivity_steps"] = sensitivity.steps
        row["sensitivity_minutes"] = sensitivity.seconds / 60
    return row


if __name__ == "__main__":
    main()
