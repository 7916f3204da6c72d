"""`@qsync_fx.rewrite`: matches and replacements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx import Plan
from tests.support.compiling.rewrites import (
    Net,
    addmm_gelu,
    explained,
    linear,
    linear_gelu,
    places,
    rewriting,
    step,
)
from tests.support.models.small_models import Counting, build, compiled

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# Matches and their replacements.


def test_every_match_is_replaced() -> None:
    fuse = rewriting(linear_gelu, addmm_gelu)
    explanation = explained(fuse)
    assert places(explanation) == {"linear_gelu": 2}
    names = [op.row.name for op in explanation.operators if op.row]
    assert names == ["layer_norm", "t", "addmm", "gelu", "t", "addmm", "gelu", "dropout"]
    model, x = build(Net), torch.randn(4, 8)
    output, grads = step(model, model, x)
    actual, actual_grads = step(compiled(model, precision="fp32", passes=[fuse]), model, x)
    assert torch.allclose(actual, output, atol=1e-6)
    assert actual_grads.keys() == grads.keys()
    assert all(torch.allclose(actual_grads[name], grads[name], atol=1e-6) for name in grads)


def test_replacement_has_ids_kinds_reasons_and_lines() -> None:
    explanation = explained(rewriting(linear_gelu, addmm_gelu), precision="bf16")
    put_in = {str(op.id): op for op in explanation.operators if op.note.by}
    assert list(put_in) == [
        "first/linear_gelu.t", "first/linear_gelu.addmm", "/gelu@first", "second/linear_gelu.t",
        "second/linear_gelu.addmm",
        "/gelu@second",
    ]  # fmt: skip
    product = put_in["first/linear_gelu.addmm"]
    assert (product.kind, str(product.precision)) == ("adjustable", "bf16")
    assert product.reason == "rewritten by linear_gelu; plan: uniform bf16"
    assert product.source is not None
    assert "self.first" in product.source.code
    assert product.node.meta["custom"]["qsync"] == "first/linear_gelu.addmm"


def test_plan_applies_to_the_replacement() -> None:
    plan = Plan("fp32", patterns=[("first", "int8"), ("**/linear_gelu.*", "bf16")])
    fuse = rewriting(linear_gelu, addmm_gelu)
    assert {
        str(op.precision)
        for op in explained(fuse, precision=None, plan=plan).operators
        if "linear_gelu.addmm" in str(op.id)
    } == {"bf16"}


def test_operator_with_an_equal_name_retains_its_id() -> None:
    """A plan made without the rewrite selects the same operators with it."""

    def put(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x * 1.0, weight, bias)

    plan = Plan("fp32", operators={"first/linear": "int8", "second/linear": "bf16"})
    precisions = {
        str(op.id): str(op.precision)
        for op in explained(rewriting(linear, put), precision=None, plan=plan).operators
        if op.kind == "adjustable"
    }
    assert (precisions["first/linear"], precisions["second/linear"]) == ("int8", "bf16")


def test_the_pattern_is_spelled_as_the_model_is() -> None:
    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.w + self.b, inplace=True)

    def find(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(torch.matmul(x, w) + b)

    def in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(x @ w + b, inplace=True)

    for pattern in (find, in_place):
        explanation = explained(
            rewriting(pattern, lambda x, w, b: torch.addmm(b, x, w)), model=Spelled()
        )
        assert places(explanation) == {pattern.__name__: 1}


def test_tensor_may_be_two_arguments() -> None:
    explanation = explained(
        rewriting(lambda a, b: a.sin() * b, lambda a, b: a * b, name="both"),
        model=lambda x: x.sin() * x,
    )
    assert places(explanation) == {"both": 1}


def test_several_results() -> None:
    def find(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    def put(x: Tensor) -> tuple[Tensor, Tensor]:
        phasor = torch.polar(torch.ones_like(x), x)
        return phasor.imag.contiguous(), phasor.real.contiguous()

    def model(x: Tensor) -> Tensor:
        return torch.tanh(x).sin() + torch.tanh(x).cos() + x.sin() * x.cos()

    fuse = rewriting(find, put)
    assert places(explained(fuse, model=model)) == {"find": 1}, (
        "the pattern matches only sin and cos of the same tensor"
    )
    x = torch.randn(4, 8)
    assert torch.allclose(compiled(model, precision="fp32", passes=[fuse])(x), model(x), atol=1e-5)


def test_consecutive_matches_are_replaced() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(x) * 2
            return x

    explanation = explained(
        rewriting(lambda x: torch.tanh(x) * 2, lambda x: x * 3, name="link"), model=Chain()
    )
    assert places(explanation) == {"link": 4}
    x = torch.randn(4, 8)
    run = compiled(
        Chain(),
        precision="fp32",
        passes=[rewriting(lambda x: torch.tanh(x) * 2, lambda x: x * 3, name="link")],
    )
    assert torch.equal(run(x), x * 3 * 3 * 3 * 3)


def test_overlapping_matches_are_replaced_in_order() -> None:
    explanation = explained(
        rewriting(lambda x: x.sin().sin(), lambda x: x.cos(), name="twice"),
        model=lambda x: x.sin().sin().sin(),
    )
    assert places(explanation) == {"twice": 1}
    assert [op.id.operator for op in explanation.operators] == ["twice.cos", "sin"]


def test_rewrite_matches_the_result_of_another() -> None:
    first = rewriting(lambda x: x.sin(), lambda x: x.cos(), name="first")
    second = rewriting(lambda x: x.cos(), lambda x: x.tanh(), name="second")
    explanation = explained(first, second, model=lambda x: x.sin())
    assert places(explanation) == {"first": 1, "second": 1}
    assert [str(op.id) for op in explanation.operators] == ["/second.tanh"]


def test_a_replacement_may_contain_the_pattern_and_drop_arguments() -> None:
    explanation = explained(
        rewriting(
            linear,
            lambda weight, x: F.linear(F.linear(x, weight), weight.t()) @ weight.t(),
            name="loop",
        )
    )
    assert places(explanation) == {"loop": 2}


def test_a_replacement_may_give_back_an_argument() -> None:
    explanation = explained(
        rewriting(lambda x: torch.tanh(x), lambda x: x, name="drop"),
        model=lambda x: torch.tanh(x) + 1,
    )
    assert [op.id.operator for op in explanation.operators] == ["add"]


# Constants and sizes.


def test_constants_of_the_pattern_must_be_equal() -> None:
    def layer_norm(eps: float) -> Any:
        return lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, eps)

    for eps, count in ((1e-5, 1), (1e-6, 0)):
        find = layer_norm(eps)
        assert places(explained(rewriting(find, lambda x: x, name="norm"))) == {"norm": count}
    assert places(explained(rewriting(lambda x: F.dropout(x, 0.5), lambda x: x, name="drop"))) == {
        "drop": 0
    }


def test_arguments_with_defaults_stand_for_any_value() -> None:
    calls = []

    def find(x: Tensor, p: float = 0.1, training: bool = True) -> Tensor:
        return F.dropout(x, p, training)

    def put(match: qsync_fx.Match, x: Tensor, p: float, training: bool) -> Tensor:
        calls.append((match["p"], p, training))
        return x * (1 - p)

    for p, training in ((0.25, True), (0.1, False), (0.1, True)):
        model = build(lambda p=p: Net(p)).train(training)
        assert places(explained(rewriting(find, put), model=model)) == {"find": 1}
    assert calls == [(0.25, 0.25, True), (0.1, 0.1, False), (0.1, 0.1, True)]


def test_numbers_that_sizes_decide() -> None:
    """`weight.shape` is [8] in one graph and symbolic in another; sizes that the pattern derives
    from it are compared in each graph.
    """

    def find(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (
            F.layer_norm(x, weight.shape, weight, bias)
            .unflatten(-1, (2, weight.shape[0] // 2))
            .flatten(0, 1)
        )

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).unflatten(-1, (2, 4)).flatten(0, 1)

    def put(x: Tensor) -> Tensor:
        return x.reshape(2 * x.shape[0], 4)

    model = Heads()
    assert places(explained(rewriting(find, put), model=model)) == {"find": 1}
    counting = Counting()
    run = counting.compile(model, passes=[rewriting(find, put)])
    for rows in (5, 6, 7):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(run(x), x.reshape(-1, 4))
    assert len(counting.graphs) == 1
