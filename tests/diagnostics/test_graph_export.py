"""Exported model graphs: one node per operator, and one edge per tensor between operators."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import torch
import transformers
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
    edges = sorted(re.findall(r'"g0\.([^"]+)" -> "g0\.([^"]+)"', text))
    assert edges == wanted
    assert ("first/linear", "/relu@first") in edges
    # Edges enter and leave the body of a checkpointed region.
    assert any(b == "second/linear" for _, b in edges) and any(
        a == "second/linear" for a, _ in edges
    )


def _object(required: str, **properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: dict[str, object]) -> dict[str, object]:
    return {"type": "array", "items": items}


TEXT: dict[str, object] = {"type": "string"}
# The fields of Model Explorer's GraphCollection (input_graph.ts, types.ts) that the export uses.
# Its JSON loader accepts an object with both `label` and `graphs`.
COLLECTION = _object(
    "label graphs",
    label=TEXT,
    graphs=_list(
        _object(
            "id nodes",
            id=TEXT,
            nodes=_list(
                _object(
                    "id label namespace",
                    id=TEXT,
                    label=TEXT,
                    namespace=TEXT,
                    attrs=_list(_object("key value", key=TEXT, value=TEXT)),
                    incomingEdges=_list(
                        _object(
                            "sourceNodeId sourceNodeOutputId targetNodeInputId",
                            sourceNodeId=TEXT,
                            sourceNodeOutputId=TEXT,
                            targetNodeInputId=TEXT,
                        )
                    ),
                    style=_object("backgroundColor", backgroundColor=TEXT),
                )
            ),
        )
    ),
)


def test_model_explorer_opens_a_bert_with_modules_as_layers(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    plan = qsync_fx.Plan("int8", [("encoder.layer.0.**", "bf16")])
    model, ids = transformers.BertModel(config), torch.randint(50, (2, 16))
    explanation = qsync_fx.explain(model, ids, options={"plan": plan})
    explanation.save_model_explorer(tmp_path / "bert.json")
    collection = json.loads((tmp_path / "bert.json").read_text())

    jsonschema.validate(collection, COLLECTION)
    assert collection["label"] == "bert"
    assert len(collection["graphs"]) == len(explanation.graphs)
    for graph, explained in zip(collection["graphs"], explanation.graphs, strict=True):
        nodes = {node["id"]: node for node in graph["nodes"]}
        assert len(nodes) == len(graph["nodes"])
        assert nodes.keys() == {str(operator.id) for operator in explained.operators}
        for node in nodes.values():
            positions = [edge["targetNodeInputId"] for edge in node["incomingEdges"]]
            assert positions == [str(index) for index in range(len(positions))]
            assert {edge["sourceNodeId"] for edge in node["incomingEdges"]} <= nodes.keys()

    dense = nodes["encoder.layer.0.intermediate.dense/linear"]
    assert dense["label"] == "linear"
    assert dense["namespace"] == "encoder/layer/0/intermediate/dense"
    attributes = {item["key"]: item["value"] for item in dense["attrs"]}
    assert attributes["precision"] == "bf16" and attributes["kind"] == "adjustable"
    assert attributes["reason"] == 'plan: pattern "encoder.layer.0.**"'
    assert attributes["flops"].endswith("K") and attributes["saved for backward"].endswith("B")
    (edge,) = dense["incomingEdges"]
    assert edge["sourceNodeId"] == "encoder.layer.0.attention.output.LayerNorm/layer_norm"
    # The color depends on the width of the format.
    other = nodes["encoder.layer.1.intermediate.dense/linear"]
    assert dense["style"] != other["style"]


def test_model_graph_excludes_formats_without_a_lowering() -> None:
    explanation = qsync_fx.explain(Branches(), torch.randn(2, 8), options={"precision": "int8"})
    states = {op.id: set(op.costs) for op in build_model_graph(explanation).operators}
    refused = next(op for op in explanation.operators if op.note.instead)
    assert "a vector" in refused.reason
    assert "int8" not in {precision for precision, _ in states[str(refused.id)]}
    assert "int8" in {precision for precision, _ in states["first/linear"]}
