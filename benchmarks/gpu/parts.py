"""Runner of `make bench-gpu`: tunes the kernels, then runs each GPU benchmark with a time limit.
Rows are written to benchmarks/results/gpu_*.json; gpu_parts.json contains the exit status and the
seconds of each part, and whether it ran out of time.

    python benchmarks/gpu/parts.py --parts tune linear --seconds 480

Each model and precision is tuned by a separate command, so that an interruption does not lose
earlier results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from qsync_fx.serialization.atomic_files import write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("tune", "linear", "conv", "quantize", "step", "products", "codecs")
TUNED = (
    ("squares", "int8"),
    ("squares", "int8_grad"),
    ("squares", "fp8"),
    ("transformers", "int8"),
    ("transformers", "fp8"),
    ("resnet50", "int8"),
    ("transformers", "int8_grad"),
)
"""Models of models.py and precisions, in order of priority: first those with targets."""

MARGIN = 45.0
"""Seconds between the time at which a part starts no further case and its end."""


def commands(
    part: str, seconds: float, rounds: int, rest: list[str], results: Path
) -> list[list[str]]:
    """Return the commands of a part."""
    if part == "tune":
        qsync = [sys.executable, "-m", "qsync_fx.cli", "tune"]
        return [
            [
                *qsync,
                f"benchmarks.gpu.models:{model}",
                "--precision",
                precision,
                "--rounds",
                str(rounds),
            ]
            for model, precision in TUNED
        ]
    until = [
        "--seconds",
        str(max(1.0, seconds - 2 * MARGIN)),
        "--json",
        str(results / f"gpu_{part}.json"),
    ]
    return [[sys.executable, str(HERE / f"{part}.py"), *until, *rest]]


def ran(command: list[str], until: float, environment: dict[str, str]) -> int | None:
    """Run a command from the repository root; return its exit status, or None after a timeout."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(MARGIN / 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which, in order (all)"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="for each part (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of tuning (%(default)s)")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="folder for the rows (%(default)s)",
    )
    parser.add_argument(
        "rest", nargs="*", help="after --: passed to every benchmark, such as --quick --device cpu"
    )
    options = parser.parse_args()
    dry = "cpu" in options.rest
    if not torch.cuda.is_available() and not dry:
        print("no GPU, so no case was measured", file=sys.stderr)
        return 1
    environment = dict(os.environ)
    if "--quick" in options.rest:
        environment["QSYNC_BENCH_QUICK"] = "1"
    results = options.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    for part in options.parts:
        since = time.monotonic()
        for command in commands(part, options.seconds, options.rounds, options.rest, results):
            name = " ".join(command[3:6]) if part == "tune" else part
            print(f"== {name}", flush=True)
            begun = time.monotonic()
            status = ran(command, since + options.seconds, environment)
            took = round(time.monotonic() - begun, 1)
            done.append({"part": name, "status": status, "seconds": took, "late": status is None})
            write_text(results / "gpu_parts.json", json.dumps(done, indent=1) + "\n")
    for entry in done:
        outcome = "ok"
        if entry["status"] != 0:
            outcome = "OUT OF TIME" if entry["late"] else "FAILED"
        print(f"{entry['part']:45} {outcome:12} {entry['seconds']:6.0f} s")
    return int(any(entry["status"] != 0 for entry in done))


if __name__ == "__main__":
    sys.exit(main())
