"""What is said to be written behind norms is, under any plan, and rules out none that fits."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.allocator import Problem
from qsync_fx.allocator.milp import milp_allocator
from qsync_fx.allocator.milp.memory_bound import MemoryLowerBound
from qsync_fx.allocator.milp.memory_bound.fusion_read_counts import ReadCounts
from qsync_fx.allocator.milp.memory_bound.pending_gradients import NormGradients, PlanStates
from qsync_fx.allocator.milp.memory_bound.unread_values import PASSING, UnreadValues
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.milp.search import MilpSearch
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.cost_mapper import States, states
from qsync_fx.predictor.memory import Orders, TrainingMemory, step_memory
from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_graph import Choices, ModelOperator
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.allocation_problems import PlainTimes, drawn_sensitivity
from tests.support.planning.drawn_graphs import every
from tests.support.tiers import ALL

FORMATS = "fp32", "bf16", "int8"
WIDE = 16


class Block(nn.Module):
    """A branch that is narrow within, so that what a stream is computed from is most of what there
    is.
    """

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(WIDE, 2, 1, bias=False), nn.Conv2d(2, WIDE, 1, bias=False)
        self.first, self.second = nn.BatchNorm2d(2), nn.BatchNorm2d(WIDE)
        self.branch = (
            nn.Sequential(nn.Conv2d(WIDE, WIDE, 1, bias=False), nn.BatchNorm2d(WIDE))
            if branch
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.branch is None else self.branch(x)
        found: Tensor = self.second(self.up(torch.relu(self.first(self.down(x)))))
        return torch.relu(found + beside)


@functools.cache
def stream(depth: int) -> ModelGraph:
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = (Block(at % 4 == 0) for at in range(depth))
    model = nn.Sequential(
        nn.Conv2d(3, WIDE, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDE, 4)
    )
    return build_model_graph(qsync_fx.explain(model.train(), torch.randn(2, 3, 8, 8)), FORMATS)


def device(depth: int, seed: int) -> DeviceClass:
    graph = stream(depth)
    return DeviceClass(
        graph, PlainTimes(seed), drawn_sensitivity(graph, seed), FORMATS, training=TrainingMemory()
    )


def drawn(part: DeviceClass, draw: random.Random) -> States:
    """A plan in narrow formats, but for some."""
    few, wide = draw.random(), draw.choice([0.0, 0.0, 0.1])
    asked = {
        operator: known[-1]
        if draw.random() < wide
        else known[0]
        if draw.random() < few
        else known[min(1, len(known) - 1)]
        for operator, known in part.choices.items()
    }
    return states(part.graph, asked)


def test_gradients_after_norms_are_live_at_once() -> None:
    part, draw, several = device(8, 0), random.Random(0), 0
    for _ in range(16):
        known = drawn(part, draw)
        memory = step_memory(known, part.training)
        certain = MemoryLowerBound(part, memory)
        before = (
            memory.held_bytes
            + memory.moments[0].of(Category.BUCKETS)
            + certain.loss_correction_bytes
        )
        written = step_memory(known, part.training, Orders.of(known, part.training).written).moments
        for moment in (one for one in certain.backward_peaks.moments if one[1] == PASSING):
            last = certain.backward_peaks.last(moment)
            held = max(
                one.bytes for one in written if one.place == "backward" and one.operator in last
            )
            least = before + certain.backward_peaks.of(known.names, moment)
            assert least <= held * (1 + 1e-9), moment
            several += least > 0.98 * held
        forward = max(one.bytes for one in written if one.place == "forward")
        assert all(
            before - certain.loss_correction_bytes + one.of(known.names) <= forward
            for one in certain.forward_peaks
        )
    assert several > 16


def sure(part: DeviceClass, known: States) -> Iterator[tuple[int, float]]:
    """Yields norms with the bytes that are said to be written behind them in FP32, gradients
    written down as a compiler does.
    """
    certain = MemoryLowerBound(part, step_memory(known, part.training))
    norming = NormGradients(certain.saved_tensors, UnreadValues(certain.saved_tensors))
    for at, norm in norming.norms.items():
        where = PlanStates(known.names)
        counts = ReadCounts(certain.saved_tensors, UnreadValues(certain.saved_tensors), where)
        found = norming.expression(counts, where, at)
        where.program.costs = [
            found.get(variable, 0.0) for variable in range(len(where.program.costs))
        ]
        solved = where.program.solve(0.0, 60.0)
        yield norm.product, found.get(-1, 0.0) + solved.objective


@ALL
@pytest.mark.parametrize("fmt", ["int8", "bf16"])
def test_gradients_after_norms_are_written_in_fp32(fmt: str) -> None:
    """Under a narrow plan, as soon as enough blocks are behind."""
    part = device(10, 0)
    known = states(
        part.graph,
        {operator: fmt if fmt in by else "bf16" for operator, by in part.choices.items()},
    )
    written = [task for task in Orders.of(known).written if task.backward and not task.library]
    seen = 0
    for product, size in sure(part, known):
        name = f"gradient of {part.graph.values[part.graph.operators[product].result].name}"
        wide = sum(
            b.bytes
            for task in written
            for b in task.writes
            if b.name == name and b.format == "fp32"
        )
        assert (
            size
            <= wide + sum(b.bytes for task in written for b in task.writes if b.name == name) + 4096
        )
        seen += size >= wide > 0
    assert seen


@ALL
@pytest.mark.parametrize("seed", range(5))
def test_plans_along_a_residual_stream_equal_brute_force(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is written behind norms in the program, near each limit of memory."""
    monkeypatch.setattr(milp_allocator, "MAX_ENUMERATED_PLANS", 0)
    part, draw = device(7, seed), random.Random(seed)
    free = draw.sample(
        [operator for operator in part.choices if "conv" in operator or "linear" in operator], 5
    )
    pinned = draw.choice(["bf16", "int8"])
    operators = tuple(
        _pinned(one, pinned) if one.id not in free else one for one in part.graph.operators
    )
    part = replace(part, graph=replace(part.graph, operators=operators))
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    known = every(problem, "a")
    peaks = sorted({judged.classes["a"].peak_bytes or 0 for _, judged in known})
    for share in (0.1, 0.5):
        limited = replace(
            problem, classes={"a": replace(part, memory=peaks[int(share * (len(peaks) - 1))])}
        )
        best = min(judged.variance for _, judged in known if not judged.exceeds(limited))
        answer = MilpAllocator().allocate(limited)
        assert answer.fits
        assert answer.bound is not None
        assert answer.bound <= best * (1 + 1e-6)
        assert answer.gap is not None
        assert answer.judged.variance == pytest.approx(best, rel=1.1e-4) or answer.gap > 1e-4
        # With all that is certain at every moment, what is best is still a plan of the program.
        search = MilpSearch(limited, 1e-6, 60.0)
        search.compute_lower_bound()
        for memory_bound in search.state.memory_bounds.values():
            memory_bound.moments = list(memory_bound.backward_peaks.moments)
        assert search.solve_bound(search.gap).bound <= best * (1 + 1e-6)


def _pinned(operator: ModelOperator, fmt: str) -> ModelOperator:
    decided = operator.decided
    if not isinstance(decided, Choices):
        return operator
    return replace(
        operator, decided=replace(decided, pinned=fmt if "norm" not in operator.row else "bf16")
    )
