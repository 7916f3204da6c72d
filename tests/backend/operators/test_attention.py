"""Attention as separate products instead of torch's fused kernel: conditions, values, and predicted
saved tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.profiler import ProfilerActivity, profile

import qsync_fx
from qsync_fx.formats import precision
from qsync_fx.graph import saved_tensors
from qsync_fx.predictor.memory.attention_memory import is_fused
from qsync_fx.profiler.model_graph_builder import build_model_graph

HEADS, TOKENS, WIDTH = 2, 32, 16


@pytest.fixture(autouse=True)
def unit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assume that the CPU computes BF16."""
    monkeypatch.setattr(saved_tensors, "default_precision", lambda device: precision("bf16"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attending(nn.Module):
    def __init__(self, trained: bool = True, **attention_kwargs: Any) -> None:
        super().__init__()
        self.parts, self.out, self.attention_kwargs = (
            nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH),
            nn.Linear(HEADS * WIDTH, 4),
            attention_kwargs,
        )
        self.parts.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], HEADS, WIDTH
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.parts(x).chunk(3, -1)
        )
        result: Tensor = self.out(
            attend(query, key, value, **self.attention_kwargs).transpose(1, 2).flatten(2)
        )
        return result


def rows(tokens: int = TOKENS) -> Tensor:
    return torch.randn(3, tokens, HEADS * WIDTH)


def by_products(model: nn.Module, x: Tensor, dynamic: bool = False, **options: Any) -> bool:
    """Return whether attention runs as separate products according to its reason."""
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    explained = qsync_fx.explain(model.train(), x, options={"precision": "bf16", **options})
    (reason,) = [
        op.reason for op in explained.operators if op.id.operator == "scaled_dot_product_attention"
    ]
    return "computed as separate products" in reason


def test_it_is_products_in_bf16_where_it_trains() -> None:
    assert by_products(Attending(), rows())
    assert by_products(Attending(scale=0.3), rows())
    assert by_products(Attending(), rows(), precision="int8"), "attention runs in BF16 under INT8"
    assert by_products(Attending(), rows(saved_tensors.MOST_TOKENS))


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_runs_quantized_products(batch: int) -> None:
    """In a batch of one sequence Inductor recognizes the products and would restore the fused
    kernel.
    """
    run = torch.compile(Attending().train(), backend="qsync", options={"precision": "bf16"})
    x = rows()[:batch]
    run(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(x).sum().backward()
    called = {event.key for event in profiled.key_averages()}
    assert "aten::bmm" in called and not any("scaled_dot_product" in name for name in called)


@pytest.mark.parametrize(
    ("model_args", "tokens", "options"),
    [
        ({"dropout_p": 0.1}, TOKENS, {}),
        ({"is_causal": True}, TOKENS, {}),
        ({"attn_mask": torch.ones(TOKENS, TOKENS).tril().bool()}, TOKENS, {}),
        ({"trained": False}, TOKENS, {}),
        ({}, saved_tensors.MOST_TOKENS + 1, {}),
        ({}, TOKENS, {"precision": "fp32"}),
        ({}, TOKENS, {"activation_recompute": True}),
        ({}, TOKENS, {"inner_backend": "aot_eager"}),
        ({}, TOKENS, {"dynamic": True}),
    ],
)
def test_all_else_is_left_to_torch(
    model_args: dict[str, Any], tokens: int, options: dict[str, Any]
) -> None:
    assert not by_products(Attending(**model_args), rows(tokens), **options)


def test_evaluation_is_left_to_torch() -> None:
    with torch.no_grad():
        assert not by_products(Attending(), rows())


def test_a_cpu_without_a_unit_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "default_precision", lambda device: precision("fp32"))
    assert not by_products(Attending(), rows())


@pytest.mark.parametrize("scale", [None, 0.3])
def test_products_are_attention(scale: float | None) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(3, HEADS, TOKENS, WIDTH, requires_grad=True) for _ in range(3)]
    narrow = [t.detach().bfloat16().requires_grad_() for t in exact]
    expected, actual = attend(*exact, scale=scale), torch.ops.qsync.attention(*narrow, scale)
    assert actual.dtype is torch.bfloat16
    back = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, exact, back)
    gradients = torch.autograd.grad(actual, narrow, back.bfloat16())
    for reference, result in zip(
        (expected, *expected_gradients), (actual, *gradients), strict=True
    ):
        assert (
            float((reference - result.float()).norm().detach() / reference.norm().detach()) < 0.01
        )


def test_a_step_by_inductor_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model, x = Attending(), rows()
    model(x).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="qsync", options={"precision": "bf16"})(
        x
    ).square().mean().backward()
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and expected is not None
        assert float((parameter.grad - expected).norm() / expected.norm()) < 0.02


def test_saved_tensors_equal_the_prediction() -> None:
    """BF16 products save the attention weights, the fused kernel of FP32 saves its result;
    activation_recompute uses the fused kernel in both.
    """
    weights = 3 * HEADS * TOKENS * TOKENS * 2
    for options, products in ({}, True), ({"activation_recompute": True}, False):
        torch._dynamo.reset()
        graph = build_model_graph(
            qsync_fx.explain(Attending().train(), rows(), options=options), ("fp32", "bf16")
        )
        (operator,) = [op for op in graph.operators if "attention" in op.row]
        saved = {state[0]: set(cost.saved.values()) for state, cost in operator.costs.items()}
        fused = {state[0]: is_fused(graph, operator, state) for state in operator.costs}
        assert fused == {"fp32": True, "bf16": not products}
        assert (weights in saved["bf16"]) is products and weights * 2 not in saved["fp32"]
