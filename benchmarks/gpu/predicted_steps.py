"""Error of predicted step time and memory on a GPU, for uniform and mixed plans.
Each plan is compiled and trained. Columns: "milliseconds" is the median wall time of a step
(forward, backward and SGD), with plans interleaved; "peak_mb" is the peak of torch's allocator,
parameters included. The column after each of them is its prediction by `qsync_fx.replay`, and
"time_error" and "peak_error" are the signed errors in percent. "profile" is the profile that
predicts: "catalog" is made by `catalog_profile` without the GPU; "measured" (--measure) is measured
on the GPU and does not contain the mixed plans. "faster" and the next column are the measured and
the predicted speedup over FP32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import Call, Rows, inner_backend, read, synchronize
from benchmarks.predictor.replay_accuracy import (
    Case,
    ResNet18,
    bert,
    classifier,
    mixed_plans,
    vgg11_bn,
)
from benchmarks.support.harness import by_size

PRECISIONS = ("fp32", "bf16", "int8")
MIXED = 2


def bert_wide() -> Case:
    """Return BERT with two layers of BERT-base's size and 32 x 128 tokens."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=2), add_pooling_layer=False)
    batch = torch.randint(30000, (32, 128)), torch.randn(32, 128, 768)

    def step(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).last_hidden_state.float(), batch[1])

    return Case(model, batch, step, torch.optim.SGD(model.parameters(), lr=1e-6))


CASES: Mapping[str, Callable[[], Case]] = {
    "BERT-base's width, 2 layers, 32 x 128 tokens": bert_wide,
    "ResNet-18, 64 x 128 x 128": lambda: classifier(ResNet18(), 64, 128),
    "VGG-11-BN, 64 x 64 x 64": lambda: classifier(vgg11_bn(), 64, 64),
}
QUICK: Mapping[str, Callable[[], Case]] = {"BERT, small": lambda: bert(1, 2, 16)}


def on(case: Case, device: torch.device) -> Case:
    """Return a case on a device, with SGD, which has no state."""
    model: nn.Module = case.model.to(device)
    return Case(
        model,
        tuple(t.to(device) for t in case.batch),
        case.step,
        torch.optim.SGD(model.parameters(), lr=1e-6),
    )


def stepping(case: Case, plan: Plan, inner: str) -> Call:
    model: Any = torch.compile(
        case.model,
        backend="qsync",
        options={"plan": plan, "inner_backend": inner},  # type: ignore[dict-item]
    )

    def run() -> None:
        case.step(model, case.batch).backward()  # type: ignore[no-untyped-call]
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)

    return run


def peak(run: Call, device: torch.device, model: nn.Module) -> float | None:
    """Return a step's peak bytes, with parameters and buffers; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronize(device)
    state_bytes = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    return float(torch.cuda.max_memory_allocated(device) - before + state_bytes)


def timed(steps: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median seconds of each step, measured interleaved."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            synchronize(device)
            since = time.perf_counter()
            run()
            synchronize(device)
            times[name].append(time.perf_counter() - since)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def error(predicted: float, real: float) -> float:
    return (predicted / real - 1) * 100


def main() -> None:
    measure = {"action": "store_true", "help": "also predict from a measured profile"}
    options = read(__doc__, measure=measure)
    rows, device = Rows(options), options.device
    gpu = device.type == "cuda"
    # The catalog has these cards; other devices use the H100's entry.
    name = next(
        (
            d
            for d in ("h200", "h100", "a100")
            if gpu and d in torch.cuda.get_device_name(device).lower()
        ),
        "h100",
    )
    cases = by_size(options.quick, QUICK, CASES)
    for case_name in rows.wanted(list(cases)):
        torch.compiler.reset()
        torch.manual_seed(0)
        case = cases[case_name]()
        case = Case(
            case.model, case.batch, case.step, torch.optim.SGD(case.model.parameters(), lr=1e-6)
        )
        sources = {
            "catalog": qsync_fx.catalog_profile(
                name, case.model, case.step, case.batch, PRECISIONS, case.optimizer
            )
        }
        ids = [str(op_id) for op_id in qsync_fx.explain(case.model, case.batch[0]).plan().operators]
        plans = {fmt: Plan.uniform(fmt) for fmt in PRECISIONS} | mixed_plans(ids, MIXED)
        case = on(case, device)
        if options.measure:
            settings: dict[str, Any] = {
                "optimizer": case.optimizer,
                "repeats": 5,
                "sensitivity": None,
                "all_reduce": False,
            }
            sources["measured"] = qsync_fx.measure(
                case.model, case.step, [case.batch], PRECISIONS, **settings
            )
        timelines = {
            source: {
                plan: qsync_fx.replay(plan_value, profile) for plan, plan_value in plans.items()
            }
            for source, profile in sources.items()
        }
        steps: dict[str, Call] = {}
        for plan, plan_value in plans.items():
            torch._dynamo.reset()
            run = stepping(case, plan_value, inner_backend(device))
            for _ in range(3):
                run()
            steps[plan] = run
        seconds = timed(steps, device, by_size(options.quick, 3, 15))
        for plan, run in steps.items():
            peak_bytes = peak(run, device, case.model)
            for source, each in timelines.items():
                timeline, base = each[plan], each[PRECISIONS[0]]
                row: dict[str, Any] = {
                    "case": case_name,
                    "plan": plan,
                    "profile": source,
                    "milliseconds": seconds[plan] * 1e3,
                }
                row |= {
                    "predicted_ms": timeline.seconds * 1e3,
                    "time_error": error(timeline.seconds, seconds[plan]),
                }
                row |= {
                    "faster": seconds[PRECISIONS[0]] / seconds[plan],
                    "predicted_faster": base.seconds / timeline.seconds,
                }
                if peak_bytes is not None and timeline.peak_bytes:
                    (predicted,) = timeline.peak_bytes.values()
                    row |= {
                        "peak_mb": peak_bytes / 1e6,
                        "predicted_mb": predicted / 1e6,
                        "peak_error": error(predicted, peak_bytes),
                    }
                rows.add(row)
    rows.finish()


if __name__ == "__main__":
    main()
