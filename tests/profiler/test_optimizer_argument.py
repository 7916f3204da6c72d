"""The optimizer argument of a measurement: an instance, a factory, or an invalid value."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx.errors import OptionError
from qsync_fx.profiler.measurement import optimizer_of
from tests.support.planning.measured_layer import BATCH, Counted, layer, quick


def test_optimizer_factory_gets_the_trained_parameters() -> None:
    model = nn.Sequential(layer(), nn.Linear(8, 8).requires_grad_(False))
    for made in (torch.optim.SGD, lambda parameters: torch.optim.SGD(parameters, lr=0.5)):
        optimizer = optimizer_of(model, made)
        assert isinstance(optimizer, torch.optim.SGD)
        assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [
            id(model[0].weight)
        ]
    instance = torch.optim.AdamW(model.parameters())
    assert optimizer_of(model, instance) is instance
    assert optimizer_of(model, None) is None


@pytest.mark.parametrize(
    "optimizer",
    ["sgd", nn.Linear(1, 1), lambda parameters: parameters],
    ids=["name", "module", "list"],
)
def test_invalid_optimizer_is_an_error(optimizer: Any) -> None:
    with pytest.raises(OptionError, match=r"torch\.optim\.Optimizer, and not of type") as caught:
        optimizer_of(layer(), optimizer)
    assert caught.value.where == "optimizer" and "SGD(model.parameters(), lr=" in (
        caught.value.do or ""
    )


def test_an_optimizer_of_another_model_is_refused_before_the_step_runs() -> None:
    step, other = Counted(), torch.optim.AdamW(layer().parameters())
    with pytest.raises(OptionError, match="AdamW, updates no parameter of the model, a Linear"):
        quick(layer(), step, optimizer=other)
    with pytest.raises(OptionError, match="AdamW, updates no parameter of the model, a Linear"):
        qsync_fx.catalog_profile("t4", layer(), step, BATCH, ["fp32"], other)
    assert not step.calls


def test_parameters_outside_the_model_are_reported() -> None:
    model, outside = layer(), nn.Parameter(torch.zeros(3))
    with pytest.warns(
        UserWarning, match="1 of 2 parameters that SGD updates, 3 numbers, are not the model's"
    ):
        optimizer_of(model, torch.optim.SGD([*model.parameters(), outside]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_of(nn.Sequential(model, nn.Linear(8, 8)), torch.optim.SGD(model.parameters()))


def test_a_profile_has_the_optimizer_that_is_made() -> None:
    profile = quick(layer(), Counted(), optimizer=torch.optim.AdamW, repeats=1)
    assert profile.optimizer == "AdamW" and profile.optimizer_seconds > 0
    assert profile.optimizer_memory is not None and profile.optimizer_memory.state == 2
