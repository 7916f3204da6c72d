"""Hybrid training on two ranks: predicted and measured steps of examples/demo.py, one row per run.
Each run profiles both ranks, plans for the rank that emulates an inference GPU, and trains with
this plan and with uniform low precision in interleaved order. Columns: "longer" is the relative
increase in step time over uniform low precision (goal: at most 0.02), "less" the relative decrease
in variance (goal: 0.3), "off" the relative error of the predicted step time (goal: within 0.05),
"waits" the additional waiting time of the training rank as a fraction of the step, "peak_to_cap"
the peak memory of the other rank divided by its limit. With --plan-batches the plan also chooses
the images of each rank, with the same sum; "idle" is then the difference of both ranks' waiting
times as a fraction of the step (goal: at most 0.03), and "predicted" has each choice's images per
second and variance. The two ranks need two idle cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, folder, show, write_json

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
UNIFORM, PLANNED = "uniform", "planned"
COMPARED = ("images per second", "variance", "batches")
"""Predictions of each choice that are reported."""


def main() -> None:
    options = arguments(
        __doc__,
        runs={"type": int, "default": 3, "help": "of the demo (%(default)s)"},
        plan_batches={"action": "store_true", "help": "plan the images of each rank, too"},
        partial={
            "type": folder,
            "help": "folder for the files of each run; complete runs in it are only evaluated",
        },
    )
    rows: list[Row] = []
    for run in range(by_size(options.quick, 1, options.runs)):
        print(f"run {run + 1}", flush=True)
        with tempfile.TemporaryDirectory() as passing:
            target = Path(passing)
            if options.partial is not None and not options.quick:
                target = options.partial / str(run)
            if not (outcome := target / "outcome.json").exists():
                command = [sys.executable, str(DEMO), "--seed", str(run), "--output", str(target)]
                command += by_size(options.quick, ["--quick"], [])
                command += ["--plan-batches" if options.plan_batches else "--no-plan-batches"]
                subprocess.run(command, check=True)
            rows.append(row(run, json.loads(outcome.read_text())))
        if options.json:
            write_json(options.json, rows, quick=options.quick)
    show(rows)


def row(seed: int, outcome: Mapping[str, Any]) -> Row:
    measured, predicted = outcome["measured"], outcome["predicted"]
    seconds = {run: measured[run]["seconds"] for run in (UNIFORM, PLANNED)}
    waits = {run: measured[run]["ranks"][0]["waiting"] for run in seconds}
    joint: dict[str, Any] = {}
    if choices := outcome["knobs"]:
        first, second = (rank["waiting"] for rank in measured[PLANNED]["ranks"])
        joint["batches"] = "/".join(map(str, measured[PLANNED]["batches"]))
        joint["idle"] = abs(first - second) / seconds[PLANNED]
        joint["predicted"] = {
            name: None if choice is None else {key: choice[key] for key in COMPARED}
            for name, choice in choices.items()
        }
    return {
        "seed": seed,
        "steps": measured[PLANNED]["steps"],
        "step_ms": 1e3 * seconds[PLANNED],
        "longer": seconds[PLANNED] / seconds[UNIFORM] - 1,
        "less": 1 - predicted[PLANNED]["variance"] / predicted[UNIFORM]["variance"],
        "off": predicted[PLANNED]["seconds"] / seconds[PLANNED] - 1,
        "uniform_off": predicted[UNIFORM]["seconds"] / seconds[UNIFORM] - 1,
        "waits": (waits[PLANNED] - waits[UNIFORM]) / seconds[UNIFORM],
        "peak_to_cap": measured[PLANNED]["peak"][-1] / outcome["memory"],
        "recovered": measured[PLANNED]["operators"][-1].get("fp32", 0)
        - measured[UNIFORM]["operators"][-1].get("fp32", 0),
        "accuracy": measured[PLANNED]["accuracy"],
        "uniform_accuracy": measured[UNIFORM]["accuracy"],
        **joint,
    }


if __name__ == "__main__":
    main()
