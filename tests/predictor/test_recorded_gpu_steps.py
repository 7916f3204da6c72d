"""Catalog predictions of training steps, compared with an H200 (gpu_predicted_steps.json).

The constants of the host in h200.toml are fitted to the uniform plans; the mixed plans are held
out. The record states that torch's fused kernels rejected the attention mask on that machine, so
that attention ran as products in FP32.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qsync_fx
from benchmarks.gpu.predicted_steps import MIXED, PRECISIONS, bert_wide
from benchmarks.predictor.replay_accuracy import mixed_plans
from qsync_fx import Plan
from qsync_fx.devices import get
from qsync_fx.devices.roofline import NO_HOST
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import SGD, Category, StepMemory, TrainingMemory, step_memory
from qsync_fx.predictor.memory.cuda_memory import FRAGMENTATION, MIB, allocated, workspace_bytes
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import loss_memory
from tests.support.tiers import ALL

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_predicted_steps.json"
ROWS: Mapping[str, Any] = {row["plan"]: row for row in json.loads(RECORD.read_text())["rows"]}
WITHOUT_HOST = replace(get("h200"), host=NO_HOST)
SGD_BYTES = 12
"""Bytes that SGD moves per parameter."""


@functools.cache
def predicted() -> tuple[DeviceTimes, Mapping[str, Plan]]:
    """Return the times of the recorded model on an H200, and the recorded plans."""
    torch.compiler.reset()
    torch.manual_seed(0)
    case = bert_wide()
    tokens, target = case.batch
    explanation = qsync_fx.explain(case.model, tokens, options={"target": "h200"})
    graph = build_model_graph(explanation, PRECISIONS)
    loss = loss_memory(torch.nn.functional.mse_loss, target.clone().requires_grad_(), target)
    plans = {fmt: Plan.uniform(fmt) for fmt in PRECISIONS}
    ids = [str(op_id) for op_id in explanation.plan().operators]
    return DeviceTimes(get("h200"), graph, SGD_BYTES, SGD, loss), plans | mixed_plans(ids, MIXED)


def memory_of(plan: str, fused_attention: bool) -> StepMemory:
    times, plans = predicted()
    training = TrainingMemory(SGD, loss=times.loss_memory, fused_attention=fused_attention)
    return step_memory(states(times.graph, plans[plan]), training)


pytestmark = ALL


@pytest.mark.parametrize("plan", ROWS)
def test_step_time_is_within_15_percent(plan: str) -> None:
    times, plans = predicted()
    milliseconds = qsync_fx.replay(plans[plan], times).seconds * 1e3
    assert milliseconds == pytest.approx(ROWS[plan]["milliseconds"], rel=0.15)


def test_page_has_the_predictions() -> None:
    times, plans = predicted()
    titles = ("plan", "measured", "kernels alone", "with the host", "error", "used for the fit")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for plan, row in ROWS.items():
        milliseconds = qsync_fx.replay(plans[plan], times).seconds * 1e3
        error = milliseconds / row["milliseconds"] - 1
        kernels = qsync_fx.replay(plans[plan], times.on(WITHOUT_HOST)).seconds * 1e3
        cells = (f"{value:.1f} ms" for value in (row["milliseconds"], kernels, milliseconds))
        fitted = "yes" if plan in PRECISIONS else "no"
        lines.append(f"| {' | '.join((plan, *cells, f'{error:+.1%}', fitted))} |")
    page = RECORD.parents[2] / "docs" / "device-catalog.md"
    before, _, rest = page.read_text().partition("<!-- host -->\n\n")
    table, _, after = rest.partition("\n\n<!-- end -->")
    if os.environ.get("QSYNC_UPDATE_DOCS") == "1":
        text = "\n".join(lines)
        page.write_text(f"{before}<!-- host -->\n\n{text}\n\n<!-- end -->{after}")
    else:
        assert table.splitlines() == lines


def test_constants_of_the_host_carry_the_prediction() -> None:
    times, plans = predicted()
    kernels = qsync_fx.replay(plans["int8"], times.on(WITHOUT_HOST)).seconds * 1e3
    assert kernels == pytest.approx(ROWS["int8"]["predicted_ms"], rel=0.05)
    assert kernels < 0.3 * ROWS["int8"]["milliseconds"]


@pytest.mark.parametrize("plan", ROWS)
def test_peak_memory_is_not_below_the_measured_one(plan: str) -> None:
    memory = memory_of(plan, fused_attention=False)
    measured = ROWS[plan]["peak_mb"] * 1e6
    assert measured <= memory.peak.bytes <= 1.2 * measured
    # torch reports tensors only; the record lacks the memory allocated before the step.
    tensors = memory.peak.bytes - memory.peak.of(Category.CUDA)
    assert tensors == pytest.approx(measured, rel=0.05)


def test_attention_with_fused_kernels_needs_less_memory() -> None:
    assert memory_of("bf16", True).peak.bytes < memory_of("bf16", False).peak.bytes


def test_workspaces_and_blocks_are_those_of_torch() -> None:
    assert memory_of("bf16", True).peak.of(Category.CUDA) == 2 * 32 * MIB + FRAGMENTATION
    assert workspace_bytes("rtx3090") == 2 * (8 * MIB + 128 * 1024)
    assert workspace_bytes("cuda") == workspace_bytes("h200"), (
        "an unknown GPU has the largest workspace"
    )
    graph, sizes = predicted()[0].graph, (0, 1, 512, 513, 10 * MIB + 1)
    assert [allocated(graph, size) for size in sizes] == [0, 512, 512, 1024, 12 * MIB]
    assert [allocated(replace(graph, device="cpu"), size) for size in sizes] == list(sizes)
