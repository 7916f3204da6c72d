"""Fused transformer layers of torch: evaluation runs the operators of training, under the same
plan.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from tests.support import tiers
from tests.support.models.small_models import build, compiled, relative_error


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Encoding(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **changes)
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
            nn.Linear(16, 4),
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, mask, padding, is_causal=False))
        return logits


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


@tiers.ALL
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_runs_the_operators_of_training(name: str, masked: bool) -> None:
    model = build(MODELS[name])
    arguments = inputs(masked, "attention" in name)
    plan = qsync_fx.explain(model, *arguments, options={"precision": "bf16"}).plan()
    # The graphs contain all products: two of an attention, two of a feed-forward network, and the
    # head.
    products = sum(op.operator == "linear" for op in plan.operators)
    assert products == (3 if "attention" in name else 5)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            exact = model(*arguments)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    fp32 = qsync_fx.Plan(operators=dict.fromkeys(plan.operators, "fp32"))
    for chosen, bound in (fp32, 0.0), (plan, 0.03):
        torch._dynamo.reset()
        with torch.no_grad():
            output = compiled(model, plan=chosen)(*arguments)
            explanation = qsync_fx.explain(model, *arguments, options={"plan": chosen})
        assert explanation.plan() == chosen, (
            "evaluation has the operators of training, with the same ids"
        )
        assert not explanation.unknown
        error = relative_error({"out": output}, {"out": exact})
        assert error <= bound
        assert (error > 0) is (bound > 0)


class Masked(nn.Module):
    """Transformer encoder with causal and padding masks, batch first or not."""

    def __init__(self, batch_first: bool, **changes: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(
            layer, 1, **{"enable_nested_tensor": batch_first, **changes}
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, **masks))
        return logits


def masks(batch_first: bool, causal: bool, padded: bool) -> dict[str, Any]:
    batch, length = (3, 5) if batch_first else (5, 3)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -1] = True
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    arguments: dict[str, Any] = (
        {"mask": mask.isinf() if padded else mask, "is_causal": True} if causal else {}
    )
    return arguments | ({"src_key_padding_mask": padding} if padded else {})


@tiers.ALL
@pytest.mark.parametrize(
    ("batch_first", "causal", "padded"),
    [
        (True, True, False),
        (False, False, True),
        (True, True, True),
        *(
            pytest.param(*case, marks=tiers.EVERY)
            for case in ((False, True, False), (True, False, True), (False, True, True))
        ),
    ],
)
def test_masks(batch_first: bool, causal: bool, padded: bool) -> None:
    """The reference is torch.compile: it does not pack padded tokens, whose outputs eager mode
    omits.
    """
    model, x, arguments = (
        build(lambda: Masked(batch_first)),
        torch.randn(3, 5, 16),
        masks(batch_first, causal, padded),
    )
    for training in (True, False):
        model.train(training)
        torch._dynamo.reset()
        with torch.set_grad_enabled(training):
            expected = torch.compile(model, backend="aot_eager")(x, **arguments)
            actual = compiled(model, precision="fp32")(x, **arguments)
            narrow = compiled(model, precision="bf16", strict=True)(x, **arguments)
        # Without gradients torch fuses the layer, which changes the order of summation.
        assert relative_error({"out": actual}, {"out": expected}) <= (0 if training else 1e-6)
        assert 0 < relative_error({"out": narrow}, {"out": expected}) < 0.03
        ran = [op for op in qsync_fx.plan_coverage(model).operators if op.id.operator == "linear"]
        assert len(ran) == 5
        assert qsync_fx.plan_coverage(model).complete


@tiers.ALL
def test_layers_with_nested_tensors_are_reported() -> None:
    model, x = build(lambda: Masked(True, mask_check=False)), torch.randn(3, 5, 16)
    arguments, advice = masks(True, False, True), "create it with enable_nested_tensor=False"
    run = compiled(model, precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run(x, **arguments).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", qsync_fx.PlanWarning)
        optimizer.step()
    model.eval()
    with torch.no_grad(), pytest.warns(qsync_fx.PlanWarning, match=advice) as caught:
        run(x, **arguments)
    (text,) = (
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, qsync_fx.PlanWarning)
    )
    assert "no compiled graph contains 6 modules of Masked" in text
    assert "encoder.layers.0.linear1 (Linear)" in text
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(qsync_fx.PlanError, match=advice):
        compiled(model, precision="bf16", strict=True)(x, **arguments)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", qsync_fx.PlanWarning)
        compiled(model, precision="fp32")(x, **arguments)
    with torch.no_grad():
        assert advice in str(qsync_fx.explain(model, x, **arguments, options={"precision": "bf16"}))
