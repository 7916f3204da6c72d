"""Memory of activations whose gradient reads a tanh or a sigmoid several times.

Inductor materializes that intermediate and runs the products around it in another order.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.peaks import real_and_predicted
from tests.support.planning.predicted_models import live_buffers

torch.set_num_threads(1)
ROWS, WIDE = 2048, 512


def perceptron(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, WIDE), activation, nn.Linear(WIDE, WIDE), activation, nn.Linear(WIDE, 64)
    ).train()


def graph_of(activation: nn.Module) -> ModelGraph:
    torch._dynamo.reset()
    explanation = qsync_fx.explain(perceptron(activation), torch.randn(ROWS, 256))
    return build_model_graph(explanation, ("fp32", "bf16", "int8"))


def test_graph_contains_the_gelu_approximation(tmp_path: object) -> None:
    for activation, method in ((nn.GELU(approximate="tanh"), "tanh"), (nn.GELU(), "")):
        graph = graph_of(activation)
        assert {operator.method for operator in graph.operators if operator.row == "gelu"} == {
            method
        }
        graph.save(f"{tmp_path}/model.json")
        assert ModelGraph.load(f"{tmp_path}/model.json") == graph


@pytest.mark.parametrize("activation", [nn.GELU(approximate="tanh"), nn.SiLU()])
def test_last_activation_is_live_with_its_gradient(activation: nn.Module) -> None:
    """The last product's weight gradient reads the activation and follows its input gradient."""

    def most(activation: nn.Module) -> int:
        return max(
            sum(live.bytes.values())
            for live in live_buffers(states(graph_of(activation), Plan("int8")))
        )

    assert most(activation) > most(nn.GELU()) + ROWS * WIDE


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
@pytest.mark.parametrize("activation", [nn.GELU(approximate="tanh"), nn.SiLU()])
def test_perceptron_peak_equals_the_prediction(activation: nn.Module, fmt: str) -> None:
    real, predicted = real_and_predicted(perceptron(activation), torch.randn(ROWS, 256), Plan(fmt))
    # oneDNN's BF16 products allocate workspaces of some hundred kilobytes.
    assert abs(predicted - real) <= 0.03 * real + 2**18
