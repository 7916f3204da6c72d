"""The sensitivity of a GPU that is not at hand: what is rounded there, and not here, counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsync_fx


def test_it_is_that_of_the_formats_of_the_target() -> None:
    """This CPU computes FP16 as BF16, whose roundings are eight times as coarse; a T4
    computes it.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(16, 32)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def found(**options: object) -> dict[str, float]:
        known = qsync_fx.sensitivity(
            model, step, [x], precisions=["fp16"], steps=2, fraction=1.0, options=options
        )
        return {operator: by["fp16"] for operator, by in known.variance.items()}

    here, there, exact = found(), found(target="t4"), found(emulate_unsupported=True)
    assert here.keys() == there.keys() == {"0/linear", "2/linear"}
    for operator, variance in there.items():
        assert 0 < variance < here[operator] / 16
        assert abs(variance - exact[operator]) < 0.2 * exact[operator]
