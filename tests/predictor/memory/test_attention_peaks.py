"""Peak memory of attention on long sequences, predicted and by torch's allocator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.devices.cpu_features import multiplied_in_fp32, native_bf16_unit
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory.attention_memory import is_fused
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.peaks import FORMATS, real_and_predicted
from tests.support.planning.predicted_models import live_buffers
from tests.support.tiers import ALL

torch.set_num_threads(1)
OFF = 0.03


class Attending(nn.Module):
    """Attention between a joint projection of query, key and value and an output projection."""

    def __init__(self, dropout: float, heads: int = 4, size: int = 128) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.parts, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        parts = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.parts(x).chunk(3, -1)
        )
        result = nn.functional.scaled_dot_product_attention(*parts, dropout_p=self.dropout)
        return self.out(result.transpose(1, 2).reshape(batch, length, size))


def rows() -> Tensor:
    return torch.randn(8, 256, 128, requires_grad=True)


def graph_of(model: nn.Module) -> ModelGraph:
    torch._dynamo.reset()
    return build_model_graph(qsync_fx.explain(model.train(), rows()), ("fp32",))


def test_attention_without_dropout_is_one_kernel() -> None:
    graph = graph_of(Attending(0.0))
    assert any(
        is_fused(graph, operator, state) for operator in graph.operators for state in operator.costs
    )


def test_attention_with_dropout_saves_scores_weights_and_mask() -> None:
    graph = graph_of(Attending(0.1))
    assert not any(
        is_fused(graph, operator, state) for operator in graph.operators for state in operator.costs
    )
    scores = 8 * 4 * 256 * 256
    begun = next(live for live in live_buffers(states(graph, Plan("fp32"))) if live.backward)
    assert (
        sorted(begun.bytes.values())[-2:] == [4 * scores, 4 * scores]
        and scores in begun.bytes.values()
    )


def test_fused_attention_saves_its_output_and_row_sums() -> None:
    back = [
        live
        for live in live_buffers(states(graph_of(Attending(0.0)), Plan("fp32")))
        if live.backward
    ]
    attending = next(live for live in back if "attention" in live.operator)
    rows, wide = 8 * 256, 128
    assert not any(name.startswith("transpose") for name, _ in attending.bytes)
    assert attending.bytes["linear", "fp32"] == 3 * 4 * rows * wide
    assert attending.bytes["scaled_dot_product_attention", "fp32"] == 4 * rows * wide
    assert attending.bytes["scaled_dot_product_attention extra 0", None] == 4 * 4 * rows


def test_fused_attention_peak_equals_the_prediction() -> None:
    torch.manual_seed(0)
    real, predicted = real_and_predicted(Attending(0.0), rows(), Plan("fp32"))
    assert abs(predicted - real) <= OFF * real


@ALL
@pytest.mark.parametrize("fmt", FORMATS)
def test_attention_with_dropout_peak_equals_the_prediction(fmt: str) -> None:
    torch.manual_seed(0)
    real, predicted = real_and_predicted(Attending(0.1), rows(), Plan(fmt))
    off = 2 * OFF if multiplied_in_fp32() else OFF
    assert abs(predicted - real) <= off * real


@ALL
@pytest.mark.skipif(
    not native_bf16_unit(), reason="attention is products on a CPU with a unit for BF16"
)
def test_attention_as_products_peak_equals_the_prediction() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    real, predicted = real_and_predicted(Attending(0.0), rows(), Plan("bf16"))
    assert abs(predicted - real) <= OFF * real
