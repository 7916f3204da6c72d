"""Cost of a change of the batch size, which replanning makes, with static and dynamic shapes.
A model is compiled in BF16 and trained with one batch size, then with two others. "compile_s" is
its first step, "move_s" and "second_move_s" are the first steps with each of the others, all
without Inductor's cache; "step_ms" is the median step with the first size, and "to_static" its
ratio to a model compiled for one size, interleaved. "static" is `torch.compile(dynamic=False)`,
"automatic" the default, which compiles a dynamic graph for the second size, and "dynamic" has the
batch marked as dynamic from the start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import QUICK, Case, ResNet18, bert, classifier
from benchmarks.support.harness import Row, arguments, by_size, finish, measure, selected

STATIC, AUTOMATIC, DYNAMIC = "static", "automatic", "dynamic"
SHAPES: Mapping[str, bool | None] = {DYNAMIC: None, STATIC: False, AUTOMATIC: None}
"""Argument `dynamic` of torch.compile; DYNAMIC marks the batch instead."""


@dataclass(frozen=True)
class Moved:
    """Model and the batch sizes of its steps."""

    build: Callable[[], Case]
    sizes: tuple[int, int, int]


CASES: Mapping[str, Moved] = {
    "BERT 2 layers, 128 tokens": Moved(lambda: bert(2, 4, 128), (4, 6, 5)),
    # With 16 images, torch's guards (>= 16 for a convolution, <= 16 for a sum) leave one size.
    "ResNet-18, 64 x 64": Moved(lambda: classifier(ResNet18(), 12, 64), (12, 14, 10)),
}
SMALL = {name: Moved(build, (4, 6, 5)) for name, build in QUICK.items()}


def compiled(case: Case, shapes: str) -> Callable[[int], float]:
    """Return a function that trains one step with a batch size and returns its seconds."""
    model = torch.compile(
        case.model, backend="qsync", dynamic=SHAPES[shapes], options={"precision": "bf16"}
    )

    def step(size: int) -> float:
        batch = [tensor.repeat(size, *[1] * (tensor.dim() - 1))[:size] for tensor in case.batch]
        if shapes == DYNAMIC:
            for tensor in batch:
                torch._dynamo.mark_dynamic(tensor, 0)
        began = time.perf_counter()
        loss: Any = case.step(model, batch)
        loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def rows_of(name: str, moved: Moved, rounds: int) -> list[Row]:
    steps: dict[str, Callable[[int], float]] = {}
    result: dict[str, dict[str, Any]] = {}
    first = moved.sizes[0]
    for shapes in SHAPES:
        if shapes == AUTOMATIC:
            # The compiled graphs and sizes of the others must not affect this compilation.
            times = measure({key: partial(step, first) for key, step in steps.items()}, rounds)
            for key in steps:
                result[key] |= {
                    "step_ms": 1e3 * times.median(key),
                    "to_static": times.ratio(key, STATIC),
                }
            torch._dynamo.reset()
        torch.manual_seed(0)
        steps[shapes] = compiled(moved.build(), shapes)
        seconds = [steps[shapes](size) for size in moved.sizes]
        columns = zip(("compile_s", "move_s", "second_move_s"), seconds, strict=True)
        result[shapes] = {"case": name, "method": shapes, "sizes": "/".join(map(str, moved.sizes))}
        result[shapes] |= dict(columns)
    torch._dynamo.reset()
    return list(result.values())


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "one case: bert, resnet", "default": None},
        rounds={"type": int, "default": 21, "help": "of the steps (%(default)s)"},
    )
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True
    # The first compilation of a process also imports the compiler.
    torch.compile(torch.nn.Linear(4, 4), backend="qsync")(torch.randn(2, 4)).sum().backward()
    rows: list[Row] = []
    for name, moved in selected(options, by_size(options.quick, SMALL, CASES)).items():
        rows += rows_of(name, moved, by_size(options.quick, 3, options.rounds))
    finish(options, rows)


if __name__ == "__main__":
    main()
