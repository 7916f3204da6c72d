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
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qsync_fx
from benchmarks.support.harness import Row, arguments, by_size, finish

PRECISIONS = ("fp32", "bf16", "int8")
BATCHES = 50
_TIME = r"([\d.]+ (?:s|minutes|hours))"
_FORESEEN = re.compile(
    rf"steps, about {_TIME} where torch's caches hold what is compiled, {_TIME} where not(?:;.*?, "
    rf"{_TIME} to {_TIME},.*)?$",
    re.MULTILINE,
)
_MINUTES = {"s": 1 / 60, "minutes": 1.0, "hours": 60.0}


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--measure":
        print(json.dumps(measured(**json.loads(sys.argv[2]))))
        return
    options = arguments(__doc__)
    layers = by_size(options.quick, 1, 12)
    rows: list[Row] = []
    for case, settings in (
        ("compiled anew, one turn, no sensitivity", {"repeats": 1, "sensitivity": None}),
        ("compiled before", {}),
    ):
        print(f"{layers} layers: {case}", flush=True)
        job = json.dumps({"layers": layers, "threads": options.threads, "how": settings})
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", job]
        done = subprocess.run(command, check=True, text=True, capture_output=True)
        match = _FORESEEN.search(done.stderr)
        assert match is not None, done.stderr
        cached, new, *others = (_minutes(words) for words in match.groups())
        predicted = {"foreseen_minutes": [round(cached + more, 1) for more in others]}
        if settings:
            predicted = {"foreseen_minutes": [round(new, 1)]}
        rows.append(
            {
                "case": case,
                "layers": layers,
                **json.loads(done.stdout.splitlines()[-1]),
                **predicted,
            }
        )
    finish(options, rows)


def _minutes(words: str | None) -> float:
    number, unit = (words or "0 s").split()
    return float(number) * _MINUTES[unit]


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

    begin = time.perf_counter()
    profile = qsync_fx.measure(model, step, batches, PRECISIONS, optimizer=optimizer, **settings)
    minutes = (time.perf_counter() - begin) / 60
    sensitivity = profile.sensitivity
    row = {"minutes": minutes, "steps": sum(len(run.steps) for run in profile.runs)}
    if sensitivity is not None:
        row["sensitivity_steps"] = sensitivity.steps
        row["sensitivity_minutes"] = sensitivity.seconds / 60
    return row


if __name__ == "__main__":
    main()
