"""Peak memory of a training step, measured with torch's allocator and predicted.

By default, Inductor's kernels are neither built nor run, which saves a minute and does not change
allocations. The incoming gradient has the size of the output, as with any loss except a plain sum.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

import qsync_fx
from benchmarks.support.unbuilt import without_kernels
from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import States, states
from qsync_fx.predictor.memory import LossMemory, Orders, TrainingMemory, step_memory
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import measured_peak

FORMATS = ("fp32", "bf16", "int8")


def most_bytes(plan_states: States, training: TrainingMemory | None = None) -> int:
    """Return the larger peak of both execution orders, including parameters, in bytes."""
    orders = Orders.of(plan_states, training)
    memories = (
        step_memory(plan_states, training, tasks) for tasks in (orders.expected, orders.written)
    )
    return max(memory.peak.bytes for memory in memories)


def real_and_predicted(
    model: nn.Module, x: Tensor, plan: Plan, built: bool = False
) -> tuple[int, int]:
    """Return the measured and predicted peak of a step, in bytes above the memory before it."""
    torch._dynamo.reset()
    graph = build_model_graph(qsync_fx.explain(model.train(), x), FORMATS)
    with nullcontext() if built else without_kernels():
        compiled = torch.compile(model, backend="qsync", options={"plan": plan})  # type: ignore[dict-item]
        with torch.no_grad():
            weights = torch.randn_like(model(x))

        def step() -> None:
            (compiled(x) * weights).sum().backward()
            model.zero_grad(set_to_none=True)
            x.grad = None

        step()
        # The weighted sum saves no tensor of its own.
        return measured_peak(step), step_memory(
            states(graph, plan), TrainingMemory(loss=LossMemory())
        ).step_bytes
