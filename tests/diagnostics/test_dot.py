"""The picture of a model is its precision DAG."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.graph.cost_dag import precision_dag


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.vector = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        y = torch.utils.checkpoint.checkpoint(self.second, h, use_reentrant=False)
        return nn.functional.linear(y, self.vector) + h.sum(-1)


def test_edges_equal_the_dag(tmp_path: Path) -> None:
    explanation = qsync_fx.explain(Branches(), torch.randn(2, 8), options={"precision": "int8"})
    explanation.save_dot(tmp_path / "net.dot")
    text = (tmp_path / "net.dot").read_text()

    dag = precision_dag(explanation.graphs[0].graph)
    operators = {name for name, data in dag.nodes(data=True) if data["type"] == "operator"}
    wanted = sorted((a, b) for a, b in dag.edges() if a in operators and b in operators)
    found = sorted(re.findall(r'"g0\.([^"]+)" -> "g0\.([^"]+)"', text))
    assert found == wanted
    assert ("first/linear", "/relu@first") in found
    # Into the body of a checkpointed region and out of it.
    assert any(b == "second/linear" for _, b in found) and any(
        a == "second/linear" for a, _ in found
    )


def test_states_exclude_formats_without_a_lowering() -> None:
    explanation = qsync_fx.explain(Branches(), torch.randn(2, 8), options={"precision": "int8"})
    precisions = {
        name: data["precisions"]
        for name, data in precision_dag(explanation.graphs[0].graph).nodes(data=True)
        if data["type"] == "operator" and data["kind"] == "adjustable"
    }
    refused = next(op for op in explanation.operators if op.note.instead)
    assert "a vector" in refused.reason
    assert "int8" not in precisions[str(refused.id)]
    assert "int8" in precisions["first/linear"]
