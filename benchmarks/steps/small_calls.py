"""Inference calls of a small model, which are dominated by Python overhead.
The variants are eager torch, Inductor, and qsync in several precisions. The model is three linear
layers of width 64, with eight rows, under `torch.no_grad`. Runs are interleaved; "microseconds" is
the median CPU time per call, and "ratio" the median ratio to Inductor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, finish, measure

WIDTH, ROWS, CALLS = 64, 8, 20
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "Inductor": {"backend": "inductor"},
    "qsync default": {"backend": "qsync"},
    "qsync bf16": {"backend": "qsync", "options": {"precision": "bf16"}},
    "qsync int8": {"backend": "qsync", "options": {"precision": "int8"}},
    "qsync int8, cache_quantized_weights": {
        "backend": "qsync",
        "options": {"precision": "int8", "cache_quantized_weights": True},
    },
}


def called(compiler: dict[str, Any] | None) -> Callable[[], None]:
    """Return a function that makes `CALLS` calls of a compiled model."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )
    model: Any = nn.Sequential(*layers).eval()
    fast = model
    if compiler is not None:
        fast = torch.compile(model, **compiler)
    x = torch.randn(ROWS, WIDTH)

    def run() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                fast(x)

    return run


def main() -> None:
    options = arguments(__doc__)
    cases = {}
    for name, compiler in WAYS.items():
        cases[name] = called(compiler)
        cases[name]()
    times = measure(cases, by_size(options.quick, 5, 101), clock=time.process_time)
    rows: list[Row] = [
        {
            "case": f"linear layers of {WIDTH}, {ROWS} rows",
            "name": name,
            "microseconds": times.median(name) * 1e6 / CALLS,
            "to": "Inductor",
            "ratio": times.ratio(name, "Inductor"),
        }
        for name in times
    ]
    finish(options, rows)


if __name__ == "__main__":
    main()
