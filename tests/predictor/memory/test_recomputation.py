"""Recomputation in the memory model: it reads live buffers, and peaks are close to real ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from benchmarks.support.unbuilt import without_kernels
from qsync_fx import Plan
from qsync_fx.allocator import DeviceClass
from qsync_fx.allocator.evaluator import PeakMemoryEvaluator, recomputing
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import LossMemory, TrainingMemory
from qsync_fx.predictor.memory.backward import Backward, recomputed
from qsync_fx.predictor.memory.buffers import Buffer
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.model.model_graph import state_named
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import measured_peak
from tests.support import tiers
from tests.support.planning.allocation_problems import PlainTimes, drawn_sensitivity
from tests.support.planning.drawn_graphs import device, graph
from tests.support.planning.peaks import FORMATS

BUDGETS = (0.75, 0.5, 0.25)


class Block(nn.Module):
    """Pre-norm transformer block: `[N, T, 128]` to `[N, T, 128]`."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.joint(self.first(x)).chunk(3, -1)
        query, key, value = (part.view(batch, length, 4, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class Basic(nn.Module):
    """Basic block of a ResNet."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(3))
        self.across = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.norms[2](self.across(x)))


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(8, 128, 128)


def resnet() -> tuple[nn.Module, Tensor]:
    stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    blocks = Basic(32, 32, 1), Basic(32, 32, 1), Basic(32, 64, 2), Basic(64, 64, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*stem, *blocks, *head), torch.randn(8, 3, 64, 64)


MODELS = {"transformer": transformer, "resnet": resnet}


def real_peak(model: nn.Module, x: Tensor, plan: Plan, budget: float) -> int:
    torch._dynamo.reset()
    options = {"plan": plan, "memory_budget": budget}
    with without_kernels():
        compiled = torch.compile(model, backend="qsync", options=options)  # type: ignore[arg-type]
        with torch.no_grad():
            weights = torch.randn_like(model(x))

        def step() -> None:
            (compiled(x) * weights).sum().backward()
            model.zero_grad(set_to_none=True)

        step()
        return measured_peak(step)


@tiers.ALL
@tiers.one_in(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_predicted_peaks_are_close_to_real_ones(name: str, fmt: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    torch._dynamo.reset()
    model_graph = build_model_graph(qsync_fx.explain(model.train(), x), FORMATS)
    training = TrainingMemory(loss=LossMemory())
    part = DeviceClass(
        model_graph, PlainTimes(0), drawn_sensitivity(model_graph), FORMATS, training=training
    )
    before = sum(p.nbytes for p in (*model.parameters(), *model.buffers(), x))
    for budget in BUDGETS:
        real = real_peak(model, x, Plan(fmt), budget)
        planned = recomputing(part, budget)
        memory = PeakMemoryEvaluator(planned, states(model_graph, Plan(fmt)))
        # Even without recomputation, the workspaces of some CPUs' BF16 kernels are missing (6%).
        assert 0.92 * real <= memory.peak_bytes - before <= 1.4 * real, budget


@given(
    seed=st.integers(0, 6),
    fmt=st.sampled_from(["fp32", "bf16", "int8"]),
    budget=st.floats(0.01, 0.99),
)
def test_recomputed_backward_passes_read_what_exists(seed: int, fmt: str, budget: float) -> None:
    forward = Forward(states(graph(seed), Plan(fmt)))
    backward = Backward(forward)
    made = {buffer for task in forward.tasks for buffer in task.writes}
    result = recomputed(forward, backward.tasks, budget)
    live: set[Buffer] = set(result.saved)
    for task in result.tasks:
        assert all(buffer in live for buffer in task.reads if buffer in made)
        live.update(task.writes)
    assert {task.operator for task in backward.tasks} <= {task.operator for task in result.tasks}
    saved = {buffer for task in backward.tasks for buffer in task.reads} & made
    sizes = [sum(buffer.bytes for buffer in buffers) for buffers in (result.saved, saved)]
    assert sizes[0] <= sizes[1]


@given(seed=st.integers(0, 6), budget=st.sampled_from(BUDGETS))
def test_recomputed_operators_run_their_forward_pass_twice(seed: int, budget: float) -> None:
    part = device(seed, ("fp32", "int8"))
    other = recomputing(part, budget)
    assert other.formats == ("fp32",)
    plan = Plan(operators=part.uniform("fp32"))
    for operator, names in zip(part.graph.operators, states(part.graph, plan).names, strict=True):
        state = state_named(names)
        before = part.times.operator(operator.id, state, [None] * 4)
        after = other.times.operator(operator.id, state, [None] * 4)
        assert after.forward == before.forward
        assert after.backward in (before.backward, before.backward + before.forward)
    assert other.training is not None and other.training.memory_budget == budget
    assert recomputing(part, 1.0) is part
