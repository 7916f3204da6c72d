"""Training and evaluation are one model to a plan: torch's fused transformer layers are the operators that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import build, compiled, relative_error
from torch import Tensor, nn

import qsync_fx


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Encoding(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **changes)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        found: Tensor = self.head(self.encoder(x, mask, padding, is_causal=False))
        return found


class Attending(nn.Module):
    def __init__(self, need_weights: bool = True) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)
        self.need_weights = need_weights

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out, weights = self.attention(x, x, x, padding, need_weights=self.need_weights)
        return self.head(out) if weights is None else self.head(out) + weights.mean()


def inputs(masked: bool, attending: bool) -> tuple[Tensor, ...]:
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    if not masked:
        return (x,)
    return (x, padding) if attending else (x, torch.ones(5, 5).triu(2).bool(), padding)


MODELS = {
    "relu": Encoding,
    "gelu first": lambda: Encoding(norm_first=True, activation="gelu"),
    "attention": Attending,
    "attention alone": lambda: Attending(False),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_runs_the_operators_of_training(name: str, masked: bool) -> None:
    model = build(MODELS[name])
    given = inputs(masked, "attention" in name)
    plan = qsync_fx.explain(model, *given, options={"precision": "bf16"}).plan()
    # All of the model is in graphs: two products a multi-head attention, and two a feed-forward network.
    products = sum(op.operator == "linear" for op in plan.operators)
    assert products == (3 if "attention" in name else 9)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            exact = model(*given)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    fp32 = qsync_fx.Plan(operators=dict.fromkeys(plan.operators, "fp32"))
    for chosen, bound in (fp32, 0.0), (plan, 0.03):
        torch._dynamo.reset()
        with torch.no_grad():
            found = compiled(model, plan=chosen)(*given)
            explanation = qsync_fx.explain(model, *given, options={"plan": chosen})
        assert explanation.plan() == chosen, "the same operators, by the same names"
        assert not explanation.unknown
        error = relative_error({"out": found}, {"out": exact})
        assert error <= bound
        assert (error > 0) is (bound > 0)
