"""Errors under `torch._dynamo.config.suppress_errors`: Dynamo falls back to eager mode only if the
user gave no plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import qsync_fx
from qsync_fx import PassError, PlanError, torch_internals
from tests.support.models.small_models import Perceptron, build


@pytest.fixture(autouse=True)
def _suppressed() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True):
        yield


@qsync_fx.graph_pass(after="classify")
def failing(graph: qsync_fx.PrecisionGraph) -> None:
    raise RuntimeError("this pass fails")


def test_error_of_a_pass_is_raised_with_a_plan() -> None:
    fast = torch.compile(
        build(Perceptron), backend="qsync", options={"precision": "bf16", "passes": [failing]}
    )
    for _ in range(2):
        with pytest.raises(PassError, match="this pass fails"):
            fast(torch.randn(4, 16))


def test_without_a_plan_it_is_suppressed() -> None:
    model, x = build(Perceptron), torch.randn(4, 16)
    fast = torch.compile(model, backend="qsync", options={"passes": [failing]})
    assert torch.equal(fast(x), model(x))


def test_an_error_of_the_inner_compiler_reaches_the_user_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(module: torch.fx.GraphModule, inputs: object) -> None:
        raise ZeroDivisionError("the compiler fails")

    monkeypatch.setattr(torch_internals, "boxed_nop", broken)
    fast = torch.compile(
        build(Perceptron),
        backend="qsync",
        options={"precision": "bf16", "inner_backend": "aot_eager"},
    )
    with pytest.raises(PlanError, match="ZeroDivisionError: the compiler fails") as caught:
        fast(torch.randn(4, 16))
    assert "forward" in str(caught.value.where)
