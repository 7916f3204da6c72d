"""Training without side effects: all values and objects are restored."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from qsync_fx.diagnostics.model_state import without_training
from qsync_fx.rounding import rounding_stream
from tests.support.models.small_models import Convolutional, build

OPTIMIZERS: dict[str, Any] = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = nn.functional.dropout(model(torch.randn(4, 1, 8, 8)), 0.5).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [False, True])
def test_training_state_is_restored(name: str, trained: bool) -> None:
    model = build(Convolutional)
    optimizer = OPTIMIZERS[name](model.parameters())
    if trained:
        train(model, optimizer)
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    model.norm.eval()
    values = {
        name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()
    }
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    modes = [module.training for module in model.modules()]
    state = {
        p: {key: (v, v.clone()) for key, v in entries.items()}
        for p, entries in optimizer.state.items()
    }
    groups = [dict(group) for group in optimizer.param_groups]
    generators = (
        torch.get_rng_state(),
        rounding_stream.state_dict(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
    )

    with without_training(model, optimizer):
        assert all(p.grad is None for p in model.parameters())
        model.train()
        train(model, optimizer)
        rounding_stream.draw(), random.random(), numpy.random.rand()

    for name, (tensor, value) in values.items():
        assert model.state_dict(keep_vars=True)[name] is tensor and torch.equal(tensor, value)
    for parameter, (gradient, value) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient and torch.equal(gradient, value)
    assert [module.training for module in model.modules()] == modes
    assert optimizer.state.keys() == state.keys()
    for parameter, entries in state.items():
        for key, (tensor, value) in entries.items():
            assert optimizer.state[parameter][key] is tensor and torch.equal(tensor, value)
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert rounding_stream.state_dict() == generators[1]
    assert (
        random.getstate() == generators[2] and numpy.random.get_state()[1].tolist() == generators[3]
    )


def test_all_is_put_back_after_an_error() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.clone()

    def interrupted() -> None:
        with without_training(model, None), torch.no_grad():
            model.weight.zero_()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model.weight, before)
