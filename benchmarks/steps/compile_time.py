"""Compile time of the passes and the verifier, as a fraction of the total compile time.
The total includes Dynamo, AOTAutograd and Inductor. Inductor's caches are off; a case is the first
training step of a model. Columns in seconds: "compile" is the total, "pipeline" the time of
`rewrite`, and "pipeline_share" their ratio; further columns are the passes. Rows "any" measure
planning in CPU time: "explain" traces a model once, and "replanned" is the median time to compute
states, reasons and costs of another plan with random formats.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

import qsync_fx
from qsync_fx.backend import compile as backend
from qsync_fx.options import Options
from qsync_fx.passes.printer import Timing

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, finish
from benchmarks.support.models import Case, Step, bert, perceptron, resnet

FORMATS = ("fp32", "bf16", "fp16", "int8", "fp8")


def measure_compile(case: Case, precision: str) -> dict[str, float]:
    """Return the seconds of compilation (first step minus second), pipeline, and each pass."""
    torch._dynamo.reset()
    timing, spent = Timing(), [0.0]
    original = backend.rewrite

    def timed(module: fx.GraphModule, inputs: Sequence[Any], options: Options, **more: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(module, inputs, options, (timing,), **more)
        finally:
            spent[0] += time.perf_counter() - begin

    model = case.build("sdpa").train()
    compiled = torch.compile(model, backend="qsync", options={"precision": precision})

    def step() -> float:
        begin = time.perf_counter()
        case.loss(compiled).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - begin

    with (
        mock.patch.object(backend, "rewrite", timed),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        first = step()
    again = step()
    # Costs are computed only if an observer such as this timer watches the passes: exclude them.
    unpaid = timing.seconds.pop("annotate_cost")
    return {"compile": first - again - unpaid, "pipeline": spent[0] - unpaid, **timing.seconds}


def measure_replanning(case: Case, plans: int) -> dict[str, float]:
    """Return the seconds to explain a model, and to compute another plan's states and costs."""
    begin = time.process_time()
    explanation = qsync_fx.explain(Step(case).train(), options={"precision": "int8"})
    explained = time.process_time() - begin
    chosen = [operator.id for operator in explanation.operators if operator.kind == "adjustable"]
    draw, times = random.Random(0), []
    for _ in range(plans):
        plan = qsync_fx.Plan(operators={op_id: draw.choice(FORMATS) for op_id in chosen})
        begin = time.process_time()
        changes = [
            (op.precision, op.output, op.reason, op.note.cost)
            for op in explanation.replanned(plan).operators
        ]
        times.append(time.process_time() - begin)
        assert len(changes) == len(explanation.operators)
    return {
        "operators": len(explanation.operators),
        "explain": explained,
        "replanned": statistics.median(times),
    }


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    cases = {"two layers": perceptron()}
    if not options.quick:
        resnet50 = resnet((3, 4, 6, 3), "bottleneck", 2, 64)
        cases = {"BERT-base": bert(12, 2, 64), "ResNet-50": resnet50}
    rows: list[Row] = []
    for name, case in cases.items():
        for precision in ("bf16", "int8"):
            print(f"{name}: {precision}", flush=True)
            seconds = measure_compile(case, precision)
            share = seconds["pipeline"] / seconds["compile"]
            rows.append({"case": name, "precision": precision, "pipeline_share": share, **seconds})
        torch._dynamo.reset()
        rows.append(
            {
                "case": name,
                "precision": "any",
                **measure_replanning(case, by_size(options.quick, 3, 21)),
            }
        )
    finish(options, rows)


if __name__ == "__main__":
    main()
