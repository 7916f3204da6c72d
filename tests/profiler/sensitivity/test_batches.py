"""Fractions of batches, and the noise of gradients between batches."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.profiler.sensitivity.gradient_step import (
    GradientNoise,
    gradients_of,
    part_of,
    samples,
    stepped,
)

Point = namedtuple("Point", "x y")


def test_parts_of_batches() -> None:
    x, mask = torch.arange(10), torch.ones(4, 4)
    batch = {"x": x, "y": [torch.zeros(10, 2), Point(torch.ones(10), 3)], "mask": mask, "name": "a"}
    half = part_of(batch, 0.45)
    assert (samples(batch), samples("nothing"), samples(half)) == (10, 1, 5)
    assert half["x"].tolist() == [0, 1, 2, 3, 4] and len(half["y"][0]) == len(half["y"][1].x) == 5
    assert (
        half["mask"] is mask
        and half["name"] == "a"
        and half["y"][1].y == 3
        and len(batch["x"]) == 10
    )
    assert len(part_of(x, 0.01)) == 1
    assert [len(part) for part in stepped([x], 3, 0.5)] == [5, 5, 5]
    assert len(list(stepped(iter([x, x]), 3, 1.0))) == 2


def test_noise_is_the_variance_of_the_gradient_between_batches() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(40)]

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def noise(batches: list[tuple[Tensor, Tensor]], fraction: float = 1.0) -> float | None:
        return qsync_fx.sensitivity(
            model, step, batches, precisions=["int8"], steps=len(batches), fraction=fraction
        ).noise

    rows = []
    for batch in data:
        gradients = torch.autograd.grad(step(model, batch), list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    expected = float(torch.stack(rows).double().var(0).sum())
    full, halves = noise(data), noise(data, fraction=0.5)
    assert full is not None and abs(full / expected - 1) < 0.4
    assert halves is not None and abs(halves / expected - 1) < 0.4
    assert noise(data[:1]) is None


def test_noise_scale_equals_the_closed_form_of_linear_regression() -> None:
    """Sample gradients x (x . w - y) with x ~ N(0, I) and y = e, e ~ N(0, s^2), have the mean w
    and a covariance with trace (n + 1) |w|^2 + n s^2 (moments of the normal distribution), up to
    the factor 2 of the squared loss.
    """
    torch.manual_seed(0)
    features, deviation = 8, 1.0
    model = nn.Linear(features, 1, bias=False)
    data = [(torch.randn(64, features), deviation * torch.randn(64, 1)) for _ in range(400)]
    for model_scale in (1.0, 2.0):
        with torch.no_grad():
            model.weight.mul_(model_scale)
        square_norm = float(model.weight.detach().double().square().sum())
        trace = (features + 1) * square_norm + features * deviation**2
        noise = GradientNoise()
        for x, y in data:
            loss = (model(x) - y).square().mean()
            noise.add(gradients_of(loss, model), len(x))
        scale = noise.scale()
        assert scale is not None
        assert abs(scale / (trace / square_norm) - 1) < 0.15
    assert GradientNoise().scale() is None


def test_sensitivity_reports_the_noise_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    weight = torch.randn(8, 1)
    inputs = [torch.randn(32, 8) for _ in range(4)]
    data = [(x, x @ weight) for x in inputs]

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    result = qsync_fx.sensitivity(model, step, data, precisions=["int8"], steps=4, fraction=0.5)
    noise = GradientNoise()
    for x, y in data:
        noise.add(gradients_of(step(model, (x[:16], y[:16])), model), 16)
    assert result.noise_scale == pytest.approx(noise.scale(), rel=1e-4)
    assert f"gradient noise scale {result.noise_scale:.3g} samples" in str(result)
