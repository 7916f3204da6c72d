"""Reductions over the process group of several ranks, printed by one rank."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support import tiers
from tests.support.processes import forks, ranks

SCRIPT = Path(__file__).parents[2] / "benchmarks/communication/reductions.py"


@tiers.ALL
def test_several_ranks_average_gradients_over_their_group() -> None:
    options = "--megabytes 0.5 --repeats 2 --json --codec qsgd8 --codec aqgb --codec aqgb16"
    environment = forks.shell({**os.environ, **ranks.ENVIRONMENT})
    torchrun = [
        environment["PYTHON_EXEC"],
        *"-m torch.distributed.run --standalone --nproc-per-node 3".split(),
    ]
    command = [*torchrun, str(SCRIPT), *options.split()]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    rows = {row["method"]: row for row in json.loads(done.stdout[done.stdout.index("[\n") :])}
    assert list(rows) == ["torch fp32", "torch fp16", "qsgd8", "aqgb", "aqgb16"]
    assert all(row["seconds"] > 0 and row["to_plain"] > 0 for row in rows.values())
    assert rows["torch fp32"]["to_plain"] == rows["torch fp16"]["to_half"] == 1
    size = 2**19
    # Of 3 ranks, each sends 2/3 of its buffer in reduce-scatter and again in all-gather. In a
    # single exchange it sends all of it to both others.
    assert size / 4 * 4 / 3 < rows["qsgd8"]["wire"] < 1.03 * size / 4 * 4 / 3 * 8.0625 / 8
    assert size < rows["aqgb16"]["wire"] < 1.03 * size
    assert 0.375 * 2 * size < rows["aqgb"]["wire"] < 1.03 * 2 * size
    assert all(
        row["wire"] <= 1.03 * row["theory"] for row in rows.values() if row["wire"] is not None
    )
