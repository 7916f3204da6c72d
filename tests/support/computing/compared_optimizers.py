"""Pairs of our and torch's optimizers, training steps, and tolerances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import qsync_fx
from qsync_fx import _C

PAIRS: dict[str, tuple[Any, Any]] = {
    name: (getattr(qsync_fx.optim, name), getattr(torch.optim, name))
    for name in qsync_fx.optim.__all__
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.25}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "betas": (0.3, 0.5), "maximize": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True, "eps": 1e-3, "weight_decay": 0.0}),
]
every_setting = pytest.mark.parametrize(
    ("name", "hyperparameters"),
    SETTINGS,
    ids=[f"{name}-{index}" for index, (name, _) in enumerate(SETTINGS)],
)
EPSILON = 2.0**-24


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of tensors in each kernel call."""
    calls: list[int] = []

    def watched(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(params: list[int], *args: Any, **kwargs: Any) -> None:
            calls.append(len(params))
            kernel(params, *args, **kwargs)

        return call

    monkeypatch.setattr(_C, "sgd", watched(_C.sgd))
    monkeypatch.setattr(_C, "adam", watched(_C.adam))
    return calls


def parameters(*values: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in values]


def steps(optimizer: Optimizer, gradients: list[list[Tensor]]) -> None:
    for now in gradients:
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], now, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def assert_alike(ours: Optimizer, torchs: Optimizer, steps_taken: int) -> None:
    """Assert that parameters and state agree within rounding errors of the steps."""
    for a, b in zip(ours.param_groups[0]["params"], torchs.param_groups[0]["params"], strict=True):
        assert ours.state[a].keys() == torchs.state[b].keys()
        largest = (
            max(float(tensor.detach().nan_to_num(0, 0, 0).abs().max()) for tensor in (a, b))
            if a.numel()
            else 0.0
        )
        pairs: list[tuple[Any, Any, float | None]] = [(a.detach(), b.detach(), max(largest, 1.0))]
        pairs += [(ours.state[a][key], torchs.state[b][key], None) for key in ours.state[a]]
        for mine, other, size in pairs:
            if not isinstance(other, Tensor):
                assert mine == other
                continue
            assert (mine.dtype, mine.shape, mine.stride()) == (
                other.dtype,
                other.shape,
                other.stride(),
            )
            scale = (
                size
                if size is not None
                else float(other.nan_to_num(0, 0, 0).abs().max())
                if other.numel()
                else 0.0
            )
            bound = 4 * steps_taken * EPSILON * scale
            torch.testing.assert_close(
                mine, other, rtol=8 * steps_taken * EPSILON, atol=bound, equal_nan=True
            )
