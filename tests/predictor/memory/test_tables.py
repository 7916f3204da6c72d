"""Lifetime of an embedding's gradient, which starts when its kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.predicted_models import live_buffers

torch.set_num_threads(1)
WORDS, SIZE = 4000, 128


class Tables(nn.Module):
    """Two embeddings whose rows are added, followed by linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.norm = (
            nn.Embedding(WORDS, SIZE),
            nn.Embedding(2, SIZE),
            nn.LayerNorm(SIZE),
        )
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.kinds(ids % 2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def ids() -> Tensor:
    return torch.randint(WORDS, (8, 128))


def test_the_gradient_of_a_table_is_written_by_the_last_kernels() -> None:
    torch._dynamo.reset()
    graph = build_model_graph(qsync_fx.explain(Tables().train(), ids()), ("fp32",))
    back = [live for live in live_buffers(states(graph, Plan("fp32"))) if live.backward]
    gradients = [4 * WORDS * SIZE in live.bytes.values() for live in back]
    assert gradients[-1] and not any(
        "linear" in live.operator
        for live, gradient in zip(back, gradients, strict=True)
        if gradient
    )
