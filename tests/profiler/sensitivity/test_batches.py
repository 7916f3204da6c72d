"""Parts of batches, and the noise of gradients between batches."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.profiler.sensitivity.gradient_step import part_of, samples, stepped

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
    assert [len(one) for one in stepped([x], 3, 0.5)] == [5, 5, 5]
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
    whole, halves = noise(data), noise(data, fraction=0.5)
    assert whole is not None and abs(whole / expected - 1) < 0.4
    assert halves is not None and abs(halves / expected - 1) < 0.4
    assert noise(data[:1]) is None
