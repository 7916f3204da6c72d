"""Fallback to the model as written if a built-in pass breaks a rule, and an error if a custom pass
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qsync_fx
from qsync_fx.errors import OptionError, PassError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.passes import verifier
from qsync_fx.passes.cascade import Cascade
from qsync_fx.passes.normalize import Normalize
from tests.support.models.small_models import (
    Convolutional,
    Perceptron,
    assert_equal,
    build,
    compiled,
    gradients,
)


@pytest.fixture
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QSYNC_VERIFY")
    torch._dynamo.reset()


def a_false_alarm(since: str, operator: str) -> verifier.VerifierRule:
    """Return a rule that always reports one operator as a violation, from the pass `since` on."""

    def check(graph: PrecisionGraph) -> Iterator[tuple[fx.Node | None, str]]:
        for op in graph.own_operators():
            if op.id.operator == operator:
                yield op.node, "it does not"

    return verifier.VerifierRule("all is well", since, check)


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(verifier, "RULES", (*verifier.RULES, a_false_alarm(*request.param)))


def trained(model: nn.Module, call: Any, x: Tensor, steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = call(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**{f"{name}.grad": g for name, g in gradients(model).items()}, **model.state_dict()}


@pytest.mark.parametrize(
    "alarm", [("insert_casts", "linear"), ("lower", "conv2d"), ("normalize", "relu")], indirect=True
)
def test_the_graph_trains_as_the_model_is_written(as_users_run_it: None, alarm: None) -> None:
    x = torch.randn(4, 1, 8, 8)
    model = build(Convolutional)
    expected = trained(model, model, x)
    model = build(Convolutional)
    with pytest.warns(
        UserWarning, match=r"breaks the rule \"all is well\".*Please report"
    ) as caught:
        actual = trained(model, compiled(model, precision="int8"), x)
    assert_equal(actual, expected)
    assert sum(item.category is UserWarning for item in caught) == 1
    assert caught[0].filename.endswith("small_models.py")


@pytest.mark.parametrize("alarm", [("cascade", "tanh")], indirect=True)
def test_fallback_has_reasons_and_preserves_ids(
    as_users_run_it: None, alarm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 16)
    with pytest.warns(UserWarning, match="layers.4/tanh"):
        fallen = qsync_fx.explain(build(Perceptron), x, options={"precision": "int8"})
    monkeypatch.setattr(verifier, "RULES", verifier.RULES[:-1])
    usual = qsync_fx.explain(build(Perceptron), x, options={"precision": "int8"})
    assert [op.id for op in fallen.operators] == [op.id for op in usual.operators]
    assert fallen.passes == usual.passes
    for op in fallen.operators:
        assert str(op.precision) == "fp32"
        assert "the graph fell back" in op.reason
        assert 'breaks the rule "all is well"' in op.reason
    assert str(fallen.operators[0].note.planned) == "int8"
    assert "fp32 (not int8)" in str(fallen)
    assert "qsync." not in fallen.graph()


@pytest.mark.parametrize("alarm", [("insert_casts", "tanh")], indirect=True)
def test_other_graphs_of_the_model_follow_the_plan(as_users_run_it: None, alarm: None) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.tanh(nn.functional.linear(x, weight))
        torch._dynamo.graph_break()
        return nn.functional.linear(y, weight)

    with pytest.warns(UserWarning, match="this graph trains|This graph trains"):
        first, second = qsync_fx.explain(
            model, torch.randn(4, 8), torch.randn(8, 8), options={"precision": "int8"}
        ).graphs
    assert {str(op.precision) for op in first.graph.operators("adjustable")} == {"fp32"}
    assert {str(op.precision) for op in second.graph.operators("adjustable")} == {"int8"}


@pytest.mark.parametrize("alarm", [("insert_casts", "tanh")], indirect=True)
def test_autocast_regions_of_the_model_stay(as_users_run_it: None, alarm: None) -> None:
    x = torch.randn(4, 16)

    def under_autocast(call: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(x)

        return run

    model = build(Perceptron)
    expected = trained(model, under_autocast(model), x)
    model = build(Perceptron)
    with pytest.warns(UserWarning, match="Please report"):
        actual = trained(model, under_autocast(compiled(model, precision="int8")), x)
    assert_equal(actual, expected)


@pytest.mark.parametrize("step", [Cascade, Normalize])
def test_a_pass_of_ours_that_crashes_is_no_end_either(
    as_users_run_it: None, monkeypatch: pytest.MonkeyPatch, step: type
) -> None:
    def crashes(self: object, graph: PrecisionGraph) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(step, "__call__", crashes)
    model, x = build(Perceptron), torch.randn(4, 16)
    with pytest.warns(
        UserWarning,
        match=rf"Pass '{step().name}' failed: IndexError",
    ):
        assert torch.equal(compiled(model, precision="int8")(x), model(x))


@pytest.mark.parametrize("alarm", [("insert_casts", "tanh")], indirect=True)
class TestWhoIsToBlame:
    def test_own_errors_are_raised_if_requested(
        self, alarm: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("QSYNC_VERIFY", "raise")
        with pytest.raises(PassError) as caught:
            qsync_fx.explain(build(Perceptron), torch.randn(4, 16), options={"precision": "int8"})
        assert caught.value.ours
        assert caught.value.step == "insert_casts"
        assert "please report" in str(caught.value.do)
        assert "layers.4/tanh" in str(caught.value.where)

    def test_ours_where_a_users_pass_has_only_decided(
        self, as_users_run_it: None, alarm: None
    ) -> None:
        @qsync_fx.graph_pass
        def keep_head(graph: PrecisionGraph) -> None:
            graph.operators("adjustable", "head")[0].assign("fp32", reason="the head stays in FP32")

        with pytest.warns(UserWarning, match="Please report"):
            qsync_fx.explain(
                build(Perceptron),
                torch.randn(4, 16),
                options={"precision": "int8", "passes": [keep_head]},
            )

    def test_both_are_named_where_a_users_pass_has_changed_the_graph(
        self, as_users_run_it: None, alarm: None
    ) -> None:
        @qsync_fx.graph_pass
        def twice(graph: PrecisionGraph) -> None:
            tanh = next(op.node for op in graph.operators() if op.id.operator == "tanh")
            with graph.graph.inserting_after(tanh):
                double = graph.graph.call_function(torch.ops.aten.mul.Tensor, (tanh, 2))
            graph.propagate(double)
            tanh.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)

        with pytest.raises(PassError) as caught:
            qsync_fx.explain(
                build(Perceptron),
                torch.randn(4, 16),
                options={"precision": "int8", "passes": [twice]},
            )
        assert not caught.value.ours
        assert "'twice'" in str(caught.value.do)
        assert "'insert_casts'" in caught.value.what
        assert "report" in str(caught.value.do)

    def test_failing_custom_pass_is_named(self, as_users_run_it: None, alarm: None) -> None:
        @qsync_fx.graph_pass(after="cascade")
        def forgets(graph: PrecisionGraph) -> None:
            graph.operators("adjustable", "head")[0].update(reason="")

        with pytest.raises(PassError, match="every decision has a reason") as caught:
            qsync_fx.explain(
                build(Perceptron),
                torch.randn(4, 16),
                options={"precision": "int8", "passes": [forgets]},
            )
        assert str(caught.value.do).startswith("correct the pass 'forgets'")


def test_invalid_value_of_the_fallback_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_VERIFY", "rasie")
    with pytest.raises(OptionError, match="QSYNC_VERIFY cannot be 'rasie'") as caught:
        qsync_fx.explain(build(Perceptron), torch.randn(4, 16))
    assert "did you mean 'raise'?" in str(caught.value.do)
