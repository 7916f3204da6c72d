"""Small models for the predictor tests, explained once per process, and random plans."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx import Plan
from qsync_fx.diagnostics import Explanation
from qsync_fx.formats import precision
from qsync_fx.graph.cost_algebra import Cost
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import cast_cost
from qsync_fx.predictor.cost_mapper import States
from qsync_fx.predictor.cost_mapper.times import ANYBODY, NEIGHBOURS, Beside, Seconds
from qsync_fx.predictor.memory import TrainingMemory
from qsync_fx.predictor.memory.buffers import lives
from qsync_fx.predictor.memory.peak_memory import step_tasks
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_graph import Name, StateNames
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.models.zoo import CASES, language, make

FORMATS = ("fp32", "bf16", "int8", "fp16", "fp8", "tf32", "fp64")
ZOO = {case.name: case for case in CASES}


class Checkpointed(nn.Module):
    """Checkpointed block with an autocast region and a residual across its boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def block(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


class Broken(nn.Module):
    """Model of two graphs, split by a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


class Tied(nn.Module):
    """Embedding and linear layer that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.table(ids)))
        return result


class Odd(nn.Module):
    """Model with explicit conversions, in-place operators, large scalars and FP64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x), self.b(x)
        second += first
        masked = first.masked_fill(x > 0, torch.finfo(torch.float32).min).softmax(
            -1, dtype=torch.float32
        )
        wide = self.c(masked).double() + self.table(torch.zeros(x.shape[0], dtype=torch.long))
        return self.d(wide.float().half().float() * 2.5) + second.view(-1).view_as(first).clamp_(
            -1e30, 1
        )


class Residual(nn.Module):
    """Residual model with norms before or after branches, a loss, and a head outside of it."""

    def __init__(self, behind: bool, depth: int = 3, drops: float = 0.0) -> None:
        super().__init__()
        self.behind, self.drop = behind, nn.Dropout(drops)
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(depth + 1))
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for index, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            if self.behind:
                x = self.norms[index](x + down(torch.nn.functional.gelu(up(x))))
            else:
                x = x + self.drop(down(torch.nn.functional.gelu(up(self.norms[index](x)))))
        if not self.drop.p:
            self.seen = torch.tanh(self.head(x[:, 0]))
        return torch.nn.functional.mse_loss(self.norms[-1](x), target)


class Gated(nn.Module):
    """Model with ReLUs between products and after residual branches, and a mean before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.up = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, norm in zip(self.up, self.norms, strict=True):
            x = torch.relu(x + norm(up(x)))
        result: Tensor = self.head(x.mean(1))
        return result.sum()


class Attending(nn.Module):
    """Attention with dropout, decomposed into matrix products on the CPU, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.view(4, 64, 4, 8).transpose(1, 2) for part in self.parts(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(*parts, dropout_p=0.1)
        return x + self.out(attended.transpose(1, 2).reshape(4, 64, 32))


def _residual(behind: bool, depth: int = 3, drops: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    shape = 4, 64, 32
    return Residual(behind, depth, drops), {
        "x": torch.randn(shape, requires_grad=True),
        "target": torch.randn(shape),
    }


def _mlp() -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    ), {"input": torch.randn(4, 8)}


OWN: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": _mlp,
    "bert2": language("BertForMaskedLM", padded=True, num_hidden_layers=2),
    "checkpointed": lambda: (Checkpointed(), {"x": torch.randn(4, 16, requires_grad=True)}),
    "broken": lambda: (Broken(), {"x": torch.randn(4, 8)}),
    "tied": lambda: (Tied(), {"ids": torch.arange(6)}),
    "odd": lambda: (Odd(), {"x": torch.randn(4, 8)}),
    "prenorm": lambda: _residual(False),
    "postnorm": lambda: _residual(True),
    "gated": lambda: (Gated(), {"x": torch.randn(4, 64, 32, requires_grad=True)}),
    "attending": lambda: (Attending(), {"x": torch.randn(4, 64, 32, requires_grad=True)}),
    "dropping": lambda: _residual(False, 6, 0.1),
}


@functools.cache
def explained(name: str) -> Explanation:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = OWN[name]() if name in OWN else make(ZOO[name])
    return qsync_fx.explain(model.train(), **inputs, options={"precision": "int8"})


@functools.cache
def graph_of(name: str) -> ModelGraph:
    return build_model_graph(explained(name))


def adjustable(name: str) -> list[str]:
    return [operator.id for operator in graph_of(name).operators if operator.kind == "adjustable"]


def plans(name: str, formats: tuple[str, ...] = FORMATS) -> st.SearchStrategy[Plan]:
    """Return a strategy of plans that name every operator, and of plans with a default format."""
    ids = adjustable(name)
    fmt = st.sampled_from(formats)
    each = st.lists(fmt, min_size=len(ids), max_size=len(ids)).map(
        lambda f: dict(zip(ids, f, strict=True))
    )
    some = st.dictionaries(st.sampled_from(ids), fmt, max_size=len(ids))
    return st.one_of(
        st.builds(lambda o: Plan(operators=o), each),
        st.builds(lambda d, o: Plan(d, (), o), fmt, some),
    )


class DrawnTimes:
    """Random times that depend only on the seed and on all arguments."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        return self._drawn(operator, str(state), *map(str, around))

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        around = [neighbours.get(by) for by in NEIGHBOURS]
        return (
            self.operator(operator, state, around)
            if neighbours.keys() == set(NEIGHBOURS)
            else Seconds(0.0, 0.0)
        )

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        return [None] * len(NEIGHBOURS)

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        seconds = self._drawn(operator, before, after, str(numel))
        return seconds if differentiated else Seconds(seconds.forward, 0.0)

    def outside(self) -> Seconds:
        return self._drawn("outside")

    def optimizer(self) -> float:
        return self._drawn("optimizer").forward

    def _drawn(self, *key: str) -> Seconds:
        draw = random.Random(f"{self.seed} {key}")
        return Seconds(draw.random() * 1e-3, draw.random() * 1e-3)


def cost_of(states: States, operator: str) -> Cost:
    """Return the cost of an operator in `states`, including casts that it owns."""
    index = states.graph.place(operator)
    total = states.graph.operators[index].costs[states.names[index]]
    for cast in states.casts:
        if cast.owner == index:
            value, after = states.graph.values[cast.value], precision(cast.after)
            read = value.numel * precision(cast.before).dtype.itemsize
            written = value.numel * after.dtype.itemsize
            total += cast_cost(read, written, after, value.differentiated)
    return total


@dataclass(frozen=True)
class LiveBuffers:
    """Live buffers at one time of a step.

    Attributes:
        operator: id of the running operator; "" for none.
        backward: whether it runs in the backward pass.
        bytes: bytes by name and format of the buffer; the key ("", None) is the workspace.
    """

    operator: str
    backward: bool
    bytes: Mapping[tuple[str, Name], int]


def live_buffers(states: States, training: TrainingMemory | None = None) -> list[LiveBuffers]:
    """Return the live buffers of a step over time."""
    moments = lives(
        step_tasks(states, training), lambda buffer: (buffer.name, buffer.format), ("", None)
    )
    return [LiveBuffers(live.operator, live.backward, live.kinds) for live in moments]
