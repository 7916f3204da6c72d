"""Error messages and progress of a sensitivity run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx.errors import ProfileError
from tests.support.planning.looked_models import Batch, batches, step, wide


def _differentiated(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


@pytest.mark.parametrize("make", [list, lambda: iter(())])
def test_no_batch_is_an_error(make: Callable[[], Any]) -> None:
    with pytest.raises(ProfileError, match="no batches"):
        qsync_fx.sensitivity(wide(nn.ReLU), step, make())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, batch: model(batch[0]), "a tensor of shape"),
        (lambda model, batch: 3.0, "a float, which is no loss"),
        (lambda model, batch: step(model, batch).detach(), "depends on no parameter"),
        (lambda model, batch: step(model, batch) * torch.nan, "the loss is nan"),
        (lambda model, batch: _differentiated(step(model, batch)), r"calls backward\(\) itself"),
        (lambda model, batch: next(model.parameters()).sum(), "Dynamo compiled no part"),
    ],
)
def test_step_without_a_loss_is_an_error(wrong: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message) as raised:
        qsync_fx.sensitivity(wide(nn.ReLU), wrong, batches(), steps=1)
    assert raised.value.do


def test_other_invalid_arguments_are_errors() -> None:
    model = wide(nn.ReLU)
    with pytest.raises(ProfileError, match="did you mean 'second_order'"):
        qsync_fx.sensitivity(model, step, batches(), "second_ordr")
    with pytest.raises(ProfileError, match="no part of a batch"):
        qsync_fx.sensitivity(model, step, batches(), fraction=0.0)
    with pytest.raises(qsync_fx.PrecisionError):
        qsync_fx.sensitivity(model, step, batches(), precisions=["int7"])
    with pytest.raises(ProfileError, match="no parameter that requires a gradient"):
        qsync_fx.sensitivity(model.requires_grad_(False), step, batches())


class _Once(torch.autograd.Function):
    """A function whose gradient is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_model_without_second_derivatives_names_other_methods() -> None:
    """The function is in the user's loss, outside of the model."""
    model = wide(nn.GELU)

    def loss(called: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(_Once.apply(called(batch[0])), batch[1])

    with pytest.raises(ProfileError, match="cannot be differentiated twice") as raised:
        qsync_fx.sensitivity(model, loss, batches(), precisions=["int8"], steps=1)
    assert 'method="injected"' in str(raised.value)
    result = qsync_fx.sensitivity(model, loss, batches(), "injected", ["int8"], steps=1)
    assert all(by["int8"] > 0 for by in result.variance.values())


def test_progress_is_shown_unless_disabled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(qsync_fx.progress, "_EVERY", 0.0)
    arguments: dict[str, Any] = {"precisions": ["int8"], "steps": 1}
    qsync_fx.sensitivity(wide(nn.ReLU), step, batches(), progress=False, **arguments)
    assert capsys.readouterr().err == ""
    qsync_fx.sensitivity(wide(nn.ReLU), step, batches(), **arguments)
    assert capsys.readouterr().err.startswith("qsync: sensitivity of Sequential: 1 of 1 after ")


def test_cost_is_printed_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    qsync_fx.sensitivity(wide(nn.ReLU), step, batches(), precisions=["int8"], steps=2)
    text = capsys.readouterr().err
    assert "second_order: 2 steps of about " in text and "5 operators in int8" in text
