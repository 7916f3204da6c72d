"""Table of layer times of a GPU, for backend/cuda/layer_tables, from the results of linear.py.

Each row is a linear layer of `gpu_linear.json` in a narrow format and in BF16 (`F.linear`). Both
gradients together are the difference between "forward + backward" and "forward".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.models import SHAPES
from qsync_fx.backend.cuda.layer_times import LayerTimes, layer_problem
from qsync_fx.backend.cuda.problem import GemmProblem
from qsync_fx.backend.cuda.tuning import Environment, save_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_linear.json"
TABLE = ROOT / "backend" / "cuda" / "layer_tables" / "h200.json"
PRECISIONS = ("int8", "int8_grad", "fp8")
WIDE = "F.linear bf16"


def layers(result: dict[str, Any]) -> Iterator[LayerTimes]:
    """Yield the layers that were measured in both passes."""
    seconds = {
        (row["case"], row["what"], row["name"]): row["microseconds"] * 1e-6
        for row in result["rows"]
        if "microseconds" in row
    }

    def parts(case: str, name: str) -> dict[str, float]:
        forward = seconds[case, "forward", name]
        return {
            "forward": forward,
            "backward": seconds[case, "forward + backward", name] - forward,
        }

    for case, (m, n, k) in SHAPES.items():
        problem = layer_problem(GemmProblem(m, n, k, "bf16", "bf16", "bf16"), "bf16")
        for precision in PRECISIONS:
            if (case, "forward + backward", f"qsync {precision}") in seconds:
                times = parts(case, f"qsync {precision}"), parts(case, WIDE)
                yield LayerTimes(problem, precision, *times)


def main() -> None:
    result = json.loads(RESULTS.read_text())
    TABLE.unlink(missing_ok=True)
    save_table(TABLE, Environment(**result["environment"]), [], layers(result))


if __name__ == "__main__":
    main()
