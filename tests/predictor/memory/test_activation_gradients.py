"""A gradient that is computed from a tanh or a sigmoid which it reads several times: Inductor
reckons with that in memory, and has products run in another order than around other activations.
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
    """The gradient of what the last product reads is computed before that of its weight, which
    reads the activation.
    """

    def most(activation: nn.Module) -> int:
        return max(
            sum(one.bytes.values())
            for one in live_buffers(states(graph_of(activation), Plan("int8")))
        )

    assert most(activation) > most(nn.GELU()) + ROWS * WIDE


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
@pytest.mark.parametrize("activation", [nn.GELU(approximate="tanh"), nn.SiLU()])
def test_perceptron_peak_equals_the_prediction(activation: nn.Module, fmt: str) -> None:
    real, found = real_and_predicted(perceptron(activation), torch.randn(ROWS, 256), Plan(fmt))
    # oneDNN's products in BF16 take some hundred kilobytes for themselves.
    assert abs(found - real) <= 0.03 * real + 2**18
