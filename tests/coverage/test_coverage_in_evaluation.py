"""Plan coverage without a training step, and for layers that share compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx import Plan, PlanError, PlanWarning
from tests.support.models.small_models import build, compiled


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


TYPO = Plan("fp32", operators={"second/lineer": "bf16"})


def told(call: Any, times: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [str(record.message) for record in caught if issubclass(record.category, PlanWarning)]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
def test_typo_is_reported_in_evaluation(mode: str) -> None:
    model, x = build(Broken), torch.randn(4, 8)
    model.train(mode != "eval")
    run = compiled(model, plan=TYPO)

    def call() -> None:
        with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
            mode, torch.enable_grad
        )():
            run(x)

    assert told(call) == [], "a later graph of the model may contain the operator"
    (text,) = told(call, times=3)
    assert "the operator second/lineer (bf16) matches no operator that a plan decides on" in text
    assert "nearest: second/linear" in text


def test_an_error_with_strict() -> None:
    run = compiled(build(Broken).eval(), plan=TYPO, strict=True)
    run(torch.randn(4, 8))
    with pytest.raises(PlanError, match="second/lineer"):
        run(torch.randn(4, 8))


def test_matching_plan_is_not_reported() -> None:
    class Aided(Broken):
        """Model with a head that only training uses, so evaluation cannot check its plan."""

        def __init__(self) -> None:
            super().__init__()
            self.aid = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.aid(x) if self.training else x)

    model, x = build(Aided), torch.randn(4, 8)
    run = compiled(
        model,
        plan=Plan("fp32", patterns=[("aid", "bf16")], operators={"second/linear": "bf16"}),
        strict=True,
    )
    model.eval()
    assert told(lambda: run(x), times=3) == []
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run(x).sum().backward()
    assert told(optimizer.step) == []
    assert qsync_fx.plan_coverage(run).complete


def test_mismatch_is_reported_once() -> None:
    """A mismatch that evaluation reported is not reported again after a training step."""
    model, x = build(Broken), torch.randn(4, 8)
    run = compiled(model, plan=TYPO)
    model.eval()
    assert len(told(lambda: run(x), times=3)) == 1
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run(x).sum().backward()
    assert told(optimizer.step) == []


# Layers that share compiled code.


class Layer(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(8, 8), keeps

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x @ x.t() @ x


class Reading(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x @ x.t() @ self.linear(x)


class Stack(nn.Module):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.relu(x)


def test_layers_with_shared_code_and_different_plans_are_reported() -> None:
    plan = Plan("fp32", patterns=[("layers.1/matmul", "bf16")])
    x = torch.randn(4, 8)
    texts = told(lambda: compiled(build(lambda: Stack(Layer)), plan=plan)(x))
    assert len(texts) == 1
    assert (
        "Dynamo uses one compiled code for 3 equal modules. It runs layers.0/matmul in fp32, and "
        "therefore layers.1/matmul too" in texts[0]
    )
    assert "for which the plan has bf16" in texts[0]
    with pytest.raises(PlanError, match="use the module"):
        compiled(build(lambda: Stack(Layer)), plan=plan, strict=True)(x)


@pytest.mark.parametrize(
    "plan", [Plan("bf16"), Plan("fp32", patterns=[("layers.*/matmul", "bf16")])]
)
def test_uniform_precision_is_applied(plan: Plan) -> None:
    assert told(lambda: compiled(build(lambda: Stack(Layer)), plan=plan)(torch.randn(4, 8))) == []


def test_layers_with_separate_code_are_not_reported() -> None:
    plan = Plan("fp32", patterns=[("layers.1/matmul", "bf16")])
    model = build(lambda: Stack(Reading))
    assert told(lambda: compiled(model, plan=plan)(torch.randn(4, 8))) == []
    ran = {
        str(ran.id): str(ran.precision)
        for ran in qsync_fx.plan_coverage(model).operators
        if ran.id.operator == "matmul"
    }
    assert ran["layers.0/matmul"] == ran["layers.2/matmul"] == "fp32"
    assert ran["layers.1/matmul"] == "bf16"
