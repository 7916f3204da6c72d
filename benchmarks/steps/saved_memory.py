"""Memory of saved tensors and peak memory of a training step, compared with BF16 autocast.
qsync runs in BF16 and INT8. Bytes are counted in torch's allocator, from the profiler's memory
events, beyond the bytes before the step. "saved_mb" is allocated after the forward pass;
"activations_mb" is its part that grows with the batch, without copies of weights; "peak_mb" is the
peak of forward and backward. "*_to_peer" is the ratio to the autocast variant with the smallest
value (eager or compiled, fused or math attention). Inductor's kernels are neither built nor run;
the allocations are the same, and independent of machine load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.steps.step_time import Variant
from benchmarks.support.harness import Row, arguments, finish, selected, write_json
from benchmarks.support.models import Case, bert, gpt2_block, perceptron, resnet, vit
from benchmarks.support.unbuilt import without_kernels

MEASURES = "saved", "activations", "peak"
INDUCTOR = {"backend": "inductor"}


def variants(case: Case) -> dict[str, Variant]:
    result: dict[str, Variant] = {}
    for attention, name in case.attentions().items():
        result[f"autocast bf16{name}"] = Variant(attention, autocast=True)
        result[f"autocast bf16 compiled{name}"] = Variant(
            attention, autocast=True, compiler=INDUCTOR
        )
    for precision in ("bf16", "int8"):
        for less in (False, True):
            options = {"precision": precision, "activation_recompute": less}
            name = f"qsync {precision}" + ", activation_recompute" * less
            result[name] = Variant(compiler={"backend": "qsync", "options": options})
    return result


def retained_and_peak(run: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes after `run`, including its result, and the peak bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = run()
    del output
    now = most = last = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
            last = now
    return last, most


def measured(case: Case, variant: Variant) -> tuple[int, int]:
    """Return the bytes after a forward pass, and the peak bytes of a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = case.build(variant.attention).train()
    trained: Any = model
    if variant.compiler is not None:
        trained = torch.compile(model, **variant.compiler)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.autocast):
            return case.loss(trained)

    def step() -> None:
        forward().backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    with without_kernels():
        step()
        tensors: list[Tensor] = []
        saved, _ = retained_and_peak(lambda: tensors.append(forward()))
        tensors.clear()
        _, peak = retained_and_peak(step)
    return saved, peak


def rows_of(name: str, make: Callable[[int], Case], batch: int) -> list[Row]:
    torch.manual_seed(0)
    case, half = make(batch), make(batch // 2)
    bytes_by_variant: dict[str, dict[str, float]] = {}
    for variant, settings in variants(case).items():
        print(f"{name}: {variant}", flush=True)
        saved, peak = measured(case, settings)
        # Bytes that do not grow with the batch cancel.
        bytes_by_variant[variant] = {
            "saved": saved,
            "activations": 2 * (saved - measured(half, settings)[0]),
            "peak": peak,
        }
    peers = [each for variant, each in bytes_by_variant.items() if variant.startswith("autocast")]
    least = {measure: min(peer[measure] for peer in peers) for measure in MEASURES}
    return [
        {"case": name, "variant": variant}
        | {f"{measure}_mb": each[measure] / 1e6 for measure in MEASURES}
        | {f"{measure}_to_peer": each[measure] / least[measure] for measure in MEASURES}
        for variant, each in bytes_by_variant.items()
    ]


def main() -> None:
    options = arguments(__doc__, only={"help": "cases that begin so: bert, gpt-2, resnet, vit"})
    cases: dict[str, tuple[Callable[[int], Case], int]]
    if options.quick:
        cases = {"two layers": (perceptron, 8)}
    else:
        cases = {
            "BERT 2 layers, 4 x 128 tokens": (partial(bert, 2), 4),
            "GPT-2 block, 4 x 256 tokens": (gpt2_block, 4),
            "ViT 2 layers, 8 x 224 x 224": (partial(vit, 2), 8),
            "ResNet-18, 32 x 96 x 96": (partial(resnet, (2, 2, 2, 2), "basic"), 32),
        }
    rows: list[Row] = []
    for name, case in selected(options, cases).items():
        rows += rows_of(name, *case)
        if options.json:
            write_json(options.json, rows, quick=options.quick)
    finish(options, rows)


if __name__ == "__main__":
    main()
