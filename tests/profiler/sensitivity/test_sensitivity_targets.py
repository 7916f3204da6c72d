"""Sensitivity for an absent target GPU: the target's roundings count, not the host's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsync_fx


def test_it_is_that_of_the_formats_of_the_target() -> None:
    """This CPU computes FP16 as BF16, with 8 times coarser rounding; a T4 computes in FP16."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(16, 32)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def variances(**options: object) -> dict[str, float]:
        result = qsync_fx.sensitivity(
            model, step, [x], precisions=["fp16"], steps=2, fraction=1.0, options=options
        )
        return {operator: by["fp16"] for operator, by in result.variance.items()}

    on_host, on_target, exact = (
        variances(),
        variances(target="t4"),
        variances(emulate_unsupported=True),
    )
    assert on_host.keys() == on_target.keys() == {"0/linear", "2/linear"}
    for operator, variance in on_target.items():
        assert 0 < variance < on_host[operator] / 16
        assert abs(variance - exact[operator]) < 0.2 * exact[operator]


def test_an_operator_without_the_format_has_the_variance_of_the_format_that_it_computes_in() -> (
    None
):
    """An embedding computes in BF16 instead of INT8, so a plan with INT8 needs both."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 8)), torch.randint(32, (16,))

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    sensitivity = qsync_fx.sensitivity(model, step, [x], precisions=["int8"], steps=1)
    assert sensitivity.variance["0/embedding"]["bf16"] > 0
    profile = qsync_fx.measure(
        model, step, [x], ["fp32", "int8"], repeats=1, sensitivity=None, all_reduce=False
    )
    plan = qsync_fx.find_plan(profile, sensitivity=sensitivity, objective="fastest", budget=1e9)
    assert {"int8", "fp32"} >= set(plan.plans["cpu"].values())
    assert not [note for note in plan.notes if note.kind.name == "LEFT_OUT"]
