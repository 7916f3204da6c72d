"""Optimizer steps of qsync_fx.optim, compared with torch.optim and a memory copy.
torch's variants are fused, foreach and the default. All update parameters of the same shapes with
constant gradients. Runs are interleaved; "milliseconds" is the median. "to_copy" is the ratio to a
copy of as many FP32 values, which moves eight bytes per value; AdamW moves 28 and SGD with momentum
20. "peer" is torch's fastest variant, and "to_peer" the ratio to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync_fx
from qsync_fx import _C

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, finish, measure, selected

Shapes = list[tuple[int, ...]]

BERT: Shapes = [*[(768, 768)] * 8, *[(768, 3072), (3072, 768)] * 2, *[(3072,)] * 2, *[(768,)] * 18]
CASES: dict[str, Shapes] = {
    "one of 4096x4096": [(4096, 4096)],
    "two layers of BERT": BERT,
    "200 of 768": [(768,)] * 200,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3},
    "SGD": {"lr": 1e-3, "momentum": 0.9},
}
TORCHS: dict[str, dict[str, Any]] = {
    "torch fused": {"fused": True},
    "torch foreach": {"foreach": True},
    "torch (default)": {},
}


def stepping(kind: Any, shapes: Shapes, **settings: Any) -> Callable[[], object]:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step: Callable[[], object] = kind(parameters, **settings).step
    return step


def cases(name: str, shapes: Shapes) -> dict[str, Callable[[], object]]:
    size = sum(torch.Size(shape).numel() for shape in shapes)
    source, target = torch.randn(size), torch.empty(size)
    result: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "qsync": stepping(getattr(qsync_fx.optim, name), shapes, **OPTIMIZERS[name]),
    }
    for peer, settings in TORCHS.items():
        result[peer] = stepping(getattr(torch.optim, name), shapes, **OPTIMIZERS[name], **settings)
    return result


def main() -> None:
    options = arguments(__doc__, only={"help": "one case, by how its name begins"})
    quick: dict[str, Shapes] = {"20 of 768": [(768,)] * 20}
    chosen = by_size(options.quick, quick, selected(options, CASES))
    rows: list[Row] = []
    for case, shapes in chosen.items():
        for name in OPTIMIZERS:
            times = measure(cases(name, shapes), repeats=by_size(options.quick, 3, 31))
            peer = min(TORCHS, key=times.median)
            rows += [
                {
                    "case": f"{name}, {case}",
                    "name": variant,
                    "milliseconds": times.median(variant) * 1e3,
                    "to_copy": times.ratio(variant, "copy"),
                    "peer": peer,
                    "to_peer": times.ratio(variant, peer),
                    "isa": _C.isa(),
                }
                for variant in times
            ]
    finish(options, rows)


if __name__ == "__main__":
    main()
