"""Detection of isomorphic blocks in transformers and residual networks, checked with networkx."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_graph import Blocks, isomorphic_blocks
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.models.zoo_torch import Residual
from tests.support.planning.predicted_models import graph_of
from tests.support.tiers import ALL

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width: int, gelu: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.act = nn.GELU() if gelu else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return result


def of(*blocks: nn.Module, shape: tuple[int, ...] = (4, 8)) -> ModelGraph:
    torch._dynamo.reset()
    x = torch.randn(*shape, requires_grad=True)
    return build_model_graph(
        qsync_fx.explain(nn.Sequential(*blocks), x, options={"precision": "int8"})
    )


def test_only_equal_blocks_are_detected() -> None:
    stem = nn.Linear(8, 8)
    (blocks,) = isomorphic_blocks(
        of(stem, Block(8), Block(8, gelu=True), Block(8), nn.Linear(8, 8), Block(8))
    )
    assert blocks.modules == ("1", "3", "5")
    assert blocks.tied[0] == ("1.norm/layer_norm", "3.norm/layer_norm", "5.norm/layer_norm")
    assert [len(names) for names in blocks.operators] == [5, 5, 5]


def test_block_after_the_model_input_is_distinct() -> None:
    """The first block adds to the model input, FP32 under any plan, as is every later sum."""
    (blocks,) = isomorphic_blocks(of(Block(8), Block(8), Block(8)))
    assert blocks.modules == ("1", "2")


def test_blocks_of_other_sizes_are_not_equal() -> None:
    assert not isomorphic_blocks(of(nn.Linear(8, 8), Block(8), nn.Linear(8, 16), Block(16)))


@ALL
def test_blocks_of_a_residual_network() -> None:
    stem = nn.Conv2d(8, 8, 1)
    blocks = [
        stem,
        *(Residual(8, 8, 1) for _ in range(3)),
        Residual(8, 16, 2),
        *(Residual(16, 16, 1) for _ in range(2)),
    ]
    groups = isomorphic_blocks(of(*blocks, shape=(2, 8, 8, 8)))
    assert [blocks.modules for blocks in groups[:2]] == [("1", "2", "3"), ("5", "6")]
    names = [name for blocks in groups for block in blocks.operators for name in block]
    assert len(names) == len(set(names)), "no operator is in two blocks"


def test_a_model_without_blocks_has_none() -> None:
    assert not isomorphic_blocks(graph_of("mlp"))


@ALL
def test_layers_of_a_transformer() -> None:
    graph = graph_of("bert2")
    layers = isomorphic_blocks(graph)[0]
    assert layers.modules == ("bert.encoder.layer.0", "bert.encoder.layer.1")
    agree(layers, graph)


def agree(blocks: Blocks, graph: ModelGraph) -> None:
    dag = nx.MultiDiGraph()
    for operator in graph.operators:
        dag.add_node(operator.id, row=operator.row, kind=operator.kind, shape=operator.shape)
        for read in operator.reads:
            source = graph.values[read.value].operator
            if source is not None:
                dag.add_edge(graph.operators[source].id, operator.id)

    def like(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all(a[key] == b[key] for key in ("row", "kind", "shape"))

    parts = [dag.subgraph(names) for names in blocks.operators]
    for part in parts[1:]:
        assert nx.is_isomorphic(parts[0], part, node_match=like)
