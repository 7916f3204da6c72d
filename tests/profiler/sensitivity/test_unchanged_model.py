"""Sensitivity runs leave the model, its gradients and the random state unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.profiler.sensitivity.gradient_step import methods
from qsync_fx.profiler.tensor_capture.graph_capture import Captured, as_it_is
from qsync_fx.profiler.tensor_capture.tensor_hooks import tapped
from tests.support import tiers
from tests.support.models import small_models
from tests.support.planning.looked_models import Batch, batches, step


class Twice(nn.Module):
    """A layer called twice, a functional product, a residual sum, and an in-place operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).relu_()
        return (h + self.layer(h)) @ self.weight


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Broken(nn.Module):
    """A model with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(F.gelu(h))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: small_models.Perceptron(0.3), (16,)),
    "convolutional": (small_models.Convolutional, (1, 8, 8)),
    "twice": (Twice, (16,)),
    "checkpointed": (Checkpointed, (16,)),
    "broken": (Broken, (16,)),
}


@pytest.mark.parametrize(
    "name", [n if n == "twice" else pytest.param(n, marks=tiers.ALL) for n in MODELS]
)
def test_sensitivity_does_not_change_the_training_state(name: str) -> None:
    """Gradients are bit-exact for runs by graph and by operator; operator ids equal plan ids."""
    make, width = MODELS[name]
    model = small_models.build(make)
    (batch, *_) = batches(width)
    captured, ids = Captured(model), list[str]()

    def gradients(called: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        step(called, batch).backward()
        return small_models.gradients(model)

    def tap(operator: Any, inputs: list[Any], call: Any) -> Any:
        ids.append(str(operator.id))
        return call(inputs)

    wanted = gradients(model)
    for run in (as_it_is, tapped(tap)):
        with captured.running(run):
            small_models.assert_equal(gradients(captured.call), wanted)
    explained = qsync_fx.explain(model, batch[0], options={"precision": "fp32"})
    assert sorted(ids) == sorted(
        str(op.id) for op in explained.operators if op.kind == "adjustable"
    )
    if name == "twice":
        assert ids == ["layer/linear", "layer/linear#1", "/matmul@layer"]


def state(model: nn.Module) -> list[Tensor]:
    grads = [p.grad if p.grad is not None else torch.zeros(()) for p in model.parameters()]
    return [t.clone() for t in (*model.state_dict().values(), *grads, torch.get_rng_state())]


@pytest.mark.parametrize(
    "method", [m if m == "second_order" else pytest.param(m, marks=tiers.ALL) for m in methods()]
)
def test_a_model_is_left_as_it_was(method: str) -> None:
    make, width = MODELS["convolutional"]
    model = small_models.build(make)
    step(model, batches(width)[0]).backward()
    model.conv.eval()
    before, place = state(model), qsync_fx.rounding_stream.state_dict()
    result = qsync_fx.sensitivity(
        model,
        step,
        batches(width),
        method,
        ["bf16", "int8"],
        steps=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert (model.training, model.conv.training) == (True, False)
    assert qsync_fx.rounding_stream.state_dict() == place
    explained = qsync_fx.explain(model, batches(width)[0][0], options={"precision": "fp32"})
    assert result.operators == [str(op.id) for op in explained.operators if op.kind == "adjustable"]
    assert (result.steps, len(result.trace), result.precisions) == (2, 2, ["bf16", "int8"])
    weights = [name for name in result.operators if name.endswith(("linear", "conv2d"))]
    assert all(result.of(name, "int8") > 0 for name in weights)


def test_a_model_is_left_as_it_was_when_a_step_fails() -> None:
    model = small_models.build(MODELS["convolutional"][0])
    before = state(model)

    def fails(called: Any, batch: Batch) -> Tensor:
        step(called, batch)
        raise KeyError("a column")

    with pytest.raises(KeyError, match="a column"):
        qsync_fx.sensitivity(model, fails, batches((1, 8, 8)), steps=1)
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
