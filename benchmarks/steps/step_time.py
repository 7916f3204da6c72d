"""Whole training steps: qsync in FP32, BF16 and INT8 against Inductor in FP32 and autocast in BF16, eager and compiled.

Forward, backward, SGD. All variants of a model take turns in one process; one thread is timed by its own clock, which leaves out what else
runs on its core. `to_peer` is the ratio to the fastest peer: Inductor for "fp32", the fastest of all autocast variants (fused and math
attention, eager and compiled) for the others, and the fastest of all of these for "by default", which is qsync without an option.
"int8_grad, all" has what else there is for speed, too: fast_dropout and the SGD of `qsync_fx.optim`. Peak memory is what torch's allocator
holds at most during a step beyond what it held before (the optimizer keeps no state), from the profiler's memory events.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import qsync_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, Times, arguments, finish, measure, selected, write_json
from benchmarks.support.models import Case, bert, encoder_layer, gpt2_block, perceptron, resnet, vgg16_bn, vit


@dataclass(frozen=True)
class Variant:
    """One way to train: attention, autocast, what compiles (None: nothing), and the optimizer."""

    attention: str = "sdpa"
    autocast: bool = False
    compiler: dict[str, Any] | None = None
    optimizer: type[torch.optim.SGD] = torch.optim.SGD


INDUCTOR: dict[str, Any] = {"backend": "inductor"}
FP32_PEER = "inductor fp32"
BY_DEFAULT = "qsync by default"


def variants(case: Case) -> dict[str, Variant]:
    found = {FP32_PEER: Variant(compiler=INDUCTOR)}
    for attention in ("sdpa", "eager") if case.attention else ("sdpa",):
        name = {"sdpa": " fused", "eager": " math"}[attention] if case.attention else ""
        found[f"autocast bf16{name}"] = Variant(attention, autocast=True)
        found[f"autocast bf16 compiled{name}"] = Variant(attention, autocast=True, compiler=INDUCTOR)
    for precision in ("fp32", "bf16", "int8", "int8_grad"):
        found[f"qsync {precision}"] = Variant(compiler={"backend": "qsync", "options": {"precision": precision}})
    found[BY_DEFAULT] = Variant(compiler={"backend": "qsync"})
    fastest = {"precision": "int8_grad", "fast_dropout": True}
    found["qsync int8_grad, all"] = Variant(
        compiler={"backend": "qsync", "options": fastest}, optimizer=qsync_fx.optim.SGD
    )
    return found


def step(case: Case, variant: Variant) -> Callable[[], None]:
    torch.manual_seed(0)
    model = case.build(variant.attention).train()
    optimizer = variant.optimizer(model.parameters(), lr=1e-3)
    # Not model.compile(): torch skips the frames of nn.Sequential there, and the model would run eagerly.
    trained = model if variant.compiler is None else torch.compile(model, **variant.compiler)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.autocast):
            loss = case.loss(trained)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def peak_memory(run: Callable[[], None]) -> int:
    """Bytes that torch's CPU allocator holds at most while `run` runs, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def rows_of(name: str, times: Times, peaks: dict[str, int]) -> list[Row]:
    peers = [variant for variant in times if variant.startswith("autocast")]
    fastest = min(peers, key=times.median)
    rows: list[Row] = []
    for variant in times:
        peer = FP32_PEER if "fp32" in variant else fastest
        if variant == BY_DEFAULT:
            peer = min((FP32_PEER, fastest), key=times.median)
        rows.append(
            {
                "case": name,
                "variant": variant,
                "seconds": times.median(variant),
                "peer": peer,
                "to_peer": times.ratio(variant, peer),
                "peak_mb": peaks[variant] / 1e6,
            }
        )
    return rows


def main() -> None:
    options = arguments(
        __doc__, only={"help": "cases that begin so: bert, encoder, gpt-2, perceptron, resnet-18, vgg, vit"}
    )
    torch.manual_seed(0)
    # All variants share the code of one model.
    torch._dynamo.config.recompile_limit = 64
    if options.quick:
        cases = {"two layers": perceptron()}
    else:
        cases = {
            "BERT 4 layers, 12 x 128 tokens": bert(),
            "VGG-16-BN, 16 x 64 x 64": vgg16_bn(),
            "ResNet-18, 32 x 96 x 96": resnet(batch=32),
            "ResNet-50, 8 x 96 x 96": resnet((3, 4, 6, 3), "bottleneck", batch=8),
            "GPT-2 block, 4 x 256 tokens": gpt2_block(),
            "ViT 2 layers, 8 x 224 x 224": vit(),
            "perceptron 64 wide, 64 rows": perceptron(64),
            "encoder layer 64 wide, 8 x 64 tokens": encoder_layer(64),
            "encoder layer 128 wide, 8 x 64 tokens": encoder_layer(128),
            "encoder layer 256 wide, 8 x 64 tokens": encoder_layer(256),
        }
    rows: list[Row] = []
    for name, case in selected(options, cases).items():
        steps = {}
        for variant, how in variants(case).items():
            print(f"{name}: {variant}", flush=True)
            steps[variant] = step(case, how)
            steps[variant]()
        clock = time.process_time if options.threads == 1 else time.perf_counter
        times = measure(steps, repeats=3 if options.quick else 9, clock=clock)
        rows += rows_of(name, times, {variant: peak_memory(run) for variant, run in steps.items()})
        if options.json:
            # Minutes a case: what is measured is kept even if the next one is interrupted.
            write_json(options.json, rows, quick=options.quick)
        torch._dynamo.reset()
    finish(options, rows)


if __name__ == "__main__":
    main()
