"""Plan check after the first training step: entries without effect are reported once per model, or
raised with "strict".
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import qsync_fx
from qsync_fx import Plan, PlanError
from tests.support import tiers
from tests.support.compiling.applied_steps import Breaking, Outer, Plain, compiled, step, uncovered

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


WRONG = [
    (
        {"patterns": [("first/lienar", "int8")]},
        "the pattern 'first/lienar' (int8) matches no operator",
        "first/linear",
    ),
    (
        {"operators": {"second/linear#1": "int8"}},
        "the operator second/linear#1 (int8) matches no operator",
        "second/linear",
    ),
]


@pytest.mark.parametrize(("wrong", "message", "near"), WRONG)
def test_rules_without_effect_are_known_after_a_step(
    wrong: dict[str, Any], message: str, near: str
) -> None:
    model, plan = Breaking(), Plan("bf16", **wrong)
    (text,) = step(model, lambda: compiled(model, plan=plan)(torch.randn(4, 16)))
    assert text.startswith("the plan is not applied: no operator matches 1 entry of the plan")
    assert message in text
    assert f"nearest: {near}" in text
    assert message in str(qsync_fx.plan_coverage(model))
    assert not qsync_fx.plan_coverage(model).complete


def test_hooks_of_others_on_optimizers_run_too() -> None:
    """The check removes its hook after the first step, while torch iterates over all hooks."""
    calls = []
    model = Plain()
    fast = compiled(model)
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(args[0]))
    try:
        for _ in range(2):
            step(model, lambda: fast(torch.randn(4, 16)))
    finally:
        handle.remove()
    assert len(calls) == 2


@pytest.mark.parametrize(("wrong", "message", "near"), WRONG)
def test_strict_raises_it(wrong: dict[str, Any], message: str, near: str) -> None:
    model, plan = Breaking(), Plan("bf16", **wrong)
    with pytest.raises(PlanError) as caught:
        step(model, lambda: compiled(model, plan=plan, strict=True)(torch.randn(4, 16)))
    assert message in str(caught.value.where)
    assert near in str(caught.value.do)


@pytest.mark.parametrize(
    "entry", [{"patterns": [("frist", "int8")]}, {"operators": {"frist/linear": "int8"}}]
)
def test_missing_module_is_detected_at_once(entry: dict[str, Any]) -> None:
    """Detection does not depend on graph breaks or on the training mode."""
    model, plan = Breaking(), Plan("bf16", **entry)
    with pytest.raises(PlanError, match=r"frist|names 1 operator") as caught:
        compiled(model, plan=plan)(torch.randn(4, 16))
    assert "first" in str(caught.value.do)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(PlanError):
        compiled(model, plan=plan)(torch.randn(4, 16))


def test_one_warning_per_model() -> None:
    model = Breaking()
    fast = compiled(model, plan=Plan("bf16", patterns=[("first/lienar", "int8")]))
    assert _global_optimizer_post_hooks
    assert len(step(model, lambda: fast(torch.randn(4, 16)))) == 1
    assert step(model, lambda: fast(torch.randn(4, 16))) == []
    assert step(model, lambda: fast(torch.randn(9, 16))) == []


def test_each_model_is_checked_at_its_step() -> None:
    first, second = Breaking(), Breaking()
    plan = Plan("bf16", patterns=[("first/lienar", "int8")])
    run, other = compiled(first, plan=plan), compiled(second, plan=plan)
    other(torch.randn(4, 16))
    assert len(step(first, lambda: run(torch.randn(4, 16)))) == 1
    assert not any(p.grad is not None for p in second.parameters())


def test_module_in_its_planned_format_counts_as_applied() -> None:
    model = Outer(nn.LSTM(16, 4, batch_first=True))
    plan = Plan("bf16", patterns=[("start", "fp32"), ("end", "fp32"), ("inner", "fp32")])
    assert step(model, lambda: compiled(model, plan=plan, strict=True)(torch.randn(2, 3, 16))) == []
    assert qsync_fx.plan_coverage(model).complete
    assert (
        step(model, lambda: compiled(model, precision="fp32", strict=True)(torch.randn(2, 3, 16)))
        == []
    )


def test_modules_that_do_not_run_are_listed_and_not_warned_of() -> None:
    class Spare(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(16, 16)

    model = Spare()
    assert (
        step(model, lambda: compiled(model, precision="bf16", strict=True)(torch.randn(4, 16)))
        == []
    )
    assert uncovered(model) == {"spare": "not called"}
    broken = nn.Sequential(Breaking())
    broken.spare = nn.Identity()
    assert (
        step(broken, lambda: compiled(broken, precision="bf16", strict=True)(torch.randn(4, 16)))
        == []
    )


def test_evaluation_may_have_less_than_training() -> None:
    class Auxiliary(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + self.auxiliary(x) if self.training else x

    model, x = Auxiliary(), torch.randn(4, 16)
    fast = compiled(model, plan=Plan("bf16", patterns=[("auxiliary", "int8")]), strict=True)
    with torch.no_grad():
        model.eval()
        fast(x)
        model.train()
    assert step(model, lambda: fast(x)) == []
    assert qsync_fx.plan_coverage(model).complete


def test_helper_modules_are_not_the_model() -> None:
    """A helper called after a graph break is compiled separately, and contains no operator of the
    plan.
    """

    def loss_of(y: Tensor) -> Tensor:
        return (y * 2).square().mean()

    class Loss(Plain):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                torch._dynamo.graph_break()
                return loss_of(y)

    model = Loss()
    plan = Plan("bf16", patterns=[("first", "int8")])
    assert step(model, lambda: compiled(model, plan=plan, strict=True)(torch.randn(4, 16))) == []


@tiers.ALL
def test_a_transformer_with_labels_and_a_compiled_optimizer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = transformers.GPT2LMHeadModel(config)
    plan = Plan("bf16", patterns=[("transformer.h.0", "int8")])
    tokens = torch.randint(50, (2, 8))
    fast = compiled(model, plan=plan, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fast(input_ids=tokens, labels=tokens).loss.backward()
    compiled(lambda: optimizer.step(), plan=plan, strict=True)()
    assert qsync_fx.plan_coverage(model).complete
    assert uncovered(model) == {}
