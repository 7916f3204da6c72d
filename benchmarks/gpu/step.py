"""Training steps of ResNet-50 and BERT-base on a GPU, compared with Inductor and autocast.
The variants are qsync in each precision, and Inductor in FP32 and under autocast. A step is
forward, backward and SGD. Each variant runs interleaved with Inductor's FP32 and with compiled BF16
autocast; times are medians. "milliseconds" is device time with launches enqueued ahead, "wall_ms"
includes Python. "to_fp32" and "to_autocast_bf16" are speedups. "peak_mb" is the peak of torch's
allocator in a step, beyond the bytes before it. Rows "quantizing" give the time of quantization
kernels in an INT8 step as a fraction of the FP16 step ("of_fp16"): the overhead of INT8
(LP-PyTorch, Fig. 7b).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import (
    Call,
    Rows,
    Target,
    errors,
    inner_backend,
    measure,
    read,
    synchronize,
)
from benchmarks.support.harness import by_size

OVERHEAD = Target("<= 5 % of the FP16 step (LP-PyTorch, Fig. 7b)", most=0.05)
LESS_MEMORY = Target("less peak memory than BF16", most=1.0)
BASE = "Inductor fp32"
OURS = (
    "round_rows",
    "round_tiles",
    "absmax_all",
    "absmax_rows",
    "absmax_columns",
    "scales_of_parts",
)
"""Quantization kernels (cpp/cutlass)."""


@dataclass(frozen=True)
class Variant:
    """Training variant: torch.compile's backend, qsync's precision, and autocast's dtype."""

    backend: str
    precision: str | None = None
    autocast: torch.dtype | None = None


VARIANTS = {
    BASE: Variant("inductor"),
    "autocast bf16 compiled": Variant("inductor", autocast=torch.bfloat16),
    "autocast fp16 compiled": Variant("inductor", autocast=torch.float16),
    "qsync int8": Variant("qsync", "int8"),
    "qsync fp16": Variant("qsync", "fp16"),
    "qsync bf16": Variant("qsync", "bf16"),
    "qsync int8_grad": Variant("qsync", "int8_grad"),
    "qsync fp8": Variant("qsync", "fp8"),
    "qsync fp32": Variant("qsync", "fp32"),
}


def models() -> dict[
    str, tuple[Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], Callable[[Any], Tensor]]
]:
    """Return model and loss by case."""
    from benchmarks.gpu.models import bert_base, resnet50

    def classified(output: Any) -> Tensor:
        logits = output.logits.float()
        return F.cross_entropy(
            logits, torch.arange(logits.shape[0], device=logits.device) % logits.shape[1]
        )

    def squared(output: Any) -> Tensor:
        states: Tensor = output.last_hidden_state.float()
        return states.square().mean() + states[..., 0].mean()

    return {
        "ResNet-50, batch 256": (resnet50, classified),
        "BERT-base, 64 x 128 tokens": (bert_base, squared),
    }


def step(case: str, variant: Variant, options: argparse.Namespace) -> Call:
    """Return a training step, which compiles in its first call."""
    make, loss_of = models()[case]
    torch.manual_seed(0)
    model, args = make()
    model.to(options.device)
    args = tree_map_only(torch.Tensor, lambda t: t.to(options.device), args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    settings: dict[str, Any] = {"backend": variant.backend}
    if variant.precision is not None:
        inner = inner_backend(options.device)
        settings["options"] = {"precision": variant.precision, "inner_backend": inner}
    elif options.device.type == "cpu":
        settings["backend"] = "aot_eager"
    trained = torch.compile(model, dynamic=False, **settings)

    def run() -> None:
        with torch.autocast(
            options.device.type, variant.autocast, enabled=variant.autocast is not None
        ):
            loss = loss_of(trained(*args))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def peak(run: Call, options: argparse.Namespace) -> float | None:
    """Return the peak bytes of a step beyond the bytes before it; None on a CPU."""
    if options.device.type != "cuda":
        return None
    run()
    synchronize(options.device)
    torch.cuda.reset_peak_memory_stats(options.device)
    before = torch.cuda.memory_allocated(options.device)
    run()
    synchronize(options.device)
    return float(torch.cuda.max_memory_allocated(options.device) - before)


def wall(run: Call, options: argparse.Namespace) -> float:
    """Return the median wall time of a step in seconds."""
    seconds = []
    for _ in range(by_size(options.quick, 2, 10)):
        synchronize(options.device)
        since = time.perf_counter()
        run()
        synchronize(options.device)
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds)


def quantizing(run: Call) -> float:
    """Return the seconds of quantization kernels in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if any(name in event.key for name in OURS)]
    return sum(float(event.self_device_time_total) for event in events) / 1e6


def measured(case: str, rows: Rows, options: argparse.Namespace) -> None:
    """Measure the variants of a model, each as soon as it is compiled."""
    steps: dict[str, Call] = {}
    seconds: dict[str, float] = {}
    peaks: dict[str, float | None] = {}
    for name in rows.wanted([f"{case}: {variant}" for variant in VARIANTS]):
        variant = name.removeprefix(f"{case}: ")
        run = step(case, VARIANTS[variant], options)
        comparisons = {
            other: steps[other] for other in (BASE, "autocast bf16 compiled") if other in steps
        }
        times, failed = measure({**comparisons, variant: run}, options, rounds=7)
        rows.add(*errors(case, failed))
        if variant in failed:
            continue
        steps[variant], seconds[variant] = run, times.median(variant)
        peaks[variant] = peak(run, options)
        row: dict[str, Any] = {
            "case": case,
            "name": variant,
            "milliseconds": seconds[variant] * 1e3,
        }
        row["wall_ms"] = wall(run, options) * 1e3
        for other, column in ((BASE, "to_fp32"), ("autocast bf16 compiled", "to_autocast_bf16")):
            if other in times:
                row[column] = 1 / times.ratio(variant, other)
        peak_bytes, bf16 = peaks[variant], peaks.get("autocast bf16 compiled")
        if peak_bytes is not None:
            row["peak_mb"] = peak_bytes / 1e6
        if variant == "qsync int8":
            share = None
            if peak_bytes is not None and bf16 is not None:
                share = peak_bytes / bf16
            row |= LESS_MEMORY.columns(share)
        rows.add(row)
    if "qsync int8" in steps and "qsync fp16" in seconds and options.device.type == "cuda":
        try:
            took = quantizing(steps["qsync int8"])
        except RuntimeError as error:  # some systems do not permit profiling
            rows.add(*errors(case, {"quantizing": str(error).splitlines()[0]}))
            return
        part = took / seconds["qsync fp16"]
        rows.add(
            {"case": case, "name": "quantizing", "milliseconds": took * 1e3, "of_fp16": part}
            | OVERHEAD.columns(part)
        )


def main() -> None:
    options = read(__doc__)
    torch.backends.cudnn.benchmark = True
    rows = Rows(options)
    for case in models():
        if options.only in case or ": " in options.only:
            torch.compiler.reset()
            measured(case, rows, options)
    rows.finish()


if __name__ == "__main__":
    main()
