"""Calls of a small model without gradients, where most of the time is the Python around kernels.

Three linear layers of 64, for eight rows, under `torch.no_grad`, by eager torch, Inductor, and the backend in several precisions. Cases are
interleaved; times are those of the processor.
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

from benchmarks.support.harness import Row, arguments, finish, measure

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
    """Return `CALLS` calls of a model that a compiler has compiled."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )
    model: Any = nn.Sequential(*layers).eval()
    fast = model if compiler is None else torch.compile(model, **compiler)
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
    times = measure(cases, 5 if options.quick else 101, clock=time.process_time)
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
