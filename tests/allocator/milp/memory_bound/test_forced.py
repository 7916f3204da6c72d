"""Gradients of which a program says that they are written down are, under any plan."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.allocator.milp.memory_bound.fusion_read_counts import ReadCounts
from qsync_fx.allocator.milp.memory_bound.pending_gradients import PlanStates
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound
from qsync_fx.allocator.milp.memory_bound.unread_values import UnreadValues
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.cost_mapper import States, states
from qsync_fx.predictor.memory.backward import READS, Backward
from qsync_fx.predictor.memory.forward import Forward, Sources
from qsync_fx.predictor.model.model_graph import Name
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.allocation_problems import OwnedTimes, drawn_sensitivity

UNSCALED = ("fp32", "tf32", "bf16")


class Block(nn.Module):
    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.branch = nn.Conv2d(4, 4, 1, bias=False) if branch else None

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.branch is None else self.norms[2](self.branch(x))
        found: Tensor = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(found + beside)


def gated() -> DeviceClass:
    """Gates along a residual stream, each of which is computed again from those before it where
    these are not kept as they are.
    """
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        *(Block(at % 3 == 0) for at in range(5)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    graph = build_model_graph(qsync_fx.explain(model.train(), torch.randn(2, 3, 4, 4)), UNSCALED)
    return DeviceClass(graph, OwnedTimes(0), drawn_sensitivity(graph, 0), UNSCALED)


class Noted(Backward):
    """A backward pass that notes of which values gradients are written down as they arrive."""

    def __init__(self, forward: Forward) -> None:
        self.noted: set[int] = set()
        self._arriving = False
        super().__init__(forward)

    def _arrive(self, operator: str, value: int, sources: Sources) -> None:
        self._arriving = True
        super()._arrive(operator, value, sources)
        self._arriving = False

    def _bounded(self, operator: str, value: int, sources: Sources, fmt: Name) -> Sources:
        if self._arriving and len(sources) > READS:
            self.noted.add(value)
        return super()._bounded(operator, value, sources, fmt)


def noted(known: States) -> set[int]:
    return Noted(Forward(known)).noted


def test_forced_tensors_are_materialized() -> None:
    draw, part = random.Random(0), gated()
    kept = SavedTensorsBound(part)
    waiting, several = UnreadValues(kept), 0
    for _ in range(12):
        asked = {operator: draw.choice(choices) for operator, choices in part.choices.items()}
        known = states(part.graph, asked)
        where = PlanStates(known.names)
        counts, program = ReadCounts(kept, waiting, where), where.program
        variables = {
            value: next(iter(written)) for value, written in counts.materialized.items() if written
        }
        for variable in variables.values():
            program.costs[variable] = 1.0
        least = program.solve(0.0, 60.0)
        assert least.values is not None
        found = noted(known)
        assert {
            value for value, variable in variables.items() if least.values[variable] > 0.5
        } <= found
        several += round(least.objective)
        decided = {variable: float(value in found) for value, variable in variables.items()}
        assert program.solve(0.0, 60.0, relaxed=True, fixed=decided).values is not None
    assert several
