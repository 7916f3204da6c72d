"""The picture of a model has its operators, and an edge for each tensor between them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.profiler.model_graph_builder import build_model_graph


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.vector = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        y = torch.utils.checkpoint.checkpoint(self.second, h, use_reentrant=False)
        return nn.functional.linear(y, self.vector) + h.sum(-1)


def test_edges_are_the_reads_of_operators(tmp_path: Path) -> None:
    explanation = qsync_fx.explain(Branches(), torch.randn(2, 8), options={"precision": "int8"})
    explanation.save_dot(tmp_path / "net.dot")
    text = (tmp_path / "net.dot").read_text()

    graph = build_model_graph(explanation)
    wanted = sorted(
        (graph.operators[source].id, operator.id)
        for operator in graph.operators
        for read in operator.reads
        if (source := graph.values[read.value].operator) is not None
    )
    found = sorted(re.findall(r'"g0\.([^"]+)" -> "g0\.([^"]+)"', text))
    assert found == wanted
    assert ("first/linear", "/relu@first") in found
    # Into the body of a checkpointed region and out of it.
    assert any(b == "second/linear" for _, b in found) and any(
        a == "second/linear" for a, _ in found
    )


def test_model_graph_excludes_formats_without_a_lowering() -> None:
    explanation = qsync_fx.explain(Branches(), torch.randn(2, 8), options={"precision": "int8"})
    states = {op.id: set(op.costs) for op in build_model_graph(explanation).operators}
    refused = next(op for op in explanation.operators if op.note.instead)
    assert "a vector" in refused.reason
    assert "int8" not in {precision for precision, _ in states[str(refused.id)]}
    assert "int8" in {precision for precision, _ in states["first/linear"]}
