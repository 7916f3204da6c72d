"""Sensitivity to formats that round to nearest, whose errors are deterministic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.profiler.sensitivity import second_order
from qsync_fx.profiler.sensitivity.estimate import _SensitivityRun
from qsync_fx.profiler.sensitivity.monte_carlo import MonteCarlo
from qsync_fx.profiler.sensitivity.noise_injection import Injected
from qsync_fx.profiler.sensitivity.second_order import SecondOrder
from qsync_fx.profiler.tensor_capture.graph_capture import Captured
from tests.support import tiers
from tests.support.models import small_models
from tests.support.planning.looked_models import batches, step


class Scaled(nn.Module):
    """Two consecutive operators that both round their result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x) * 0.3


class Forked(nn.Module):
    """A tensor with one reader in the narrow format and one in a wide format."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.tanh(x)


class Joined(nn.Module):
    """An operator that reads a list of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sigmoid(x[:, :32]), x[:, 32:]], 1)


def stack(middle: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), middle(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    )


@pytest.mark.parametrize(
    "middle", [nn.GELU, nn.Identity, nn.ReLU, lambda: nn.LayerNorm(64), Scaled, Forked, Joined]
)
def test_downstream_operators_in_the_format_count_to_the_operator(
    middle: Callable[[], nn.Module],
) -> None:
    """Method "injected" adds the exact deterministic error, so it equals a run under the plan."""
    model = small_models.build(lambda: stack(middle))
    looking = _SensitivityRun(Captured(model), step, ["bf16"], 0)
    with looking.at(0, batches()[0]) as now:
        estimate, truth = Injected().look(now()), MonteCarlo().look(now())
    assert estimate.keys() == truth.keys()
    for key, square in truth.items():
        assert estimate[key] == pytest.approx(square, rel=0.02), key


@tiers.ALL
@pytest.mark.parametrize(
    "middle", [nn.GELU, nn.Identity, lambda: nn.LayerNorm(64), Scaled, Forked, Joined]
)
def test_second_derivatives_carry_the_very_errors(middle: Callable[[], nn.Module]) -> None:
    model = small_models.build(lambda: stack(middle))
    looking = _SensitivityRun(Captured(model), step, ["bf16"], 0)
    with looking.at(0, batches()[0]) as now:
        estimate, truth = SecondOrder(draws=512).look(now()), MonteCarlo().look(now())
    for key, square in truth.items():
        assert estimate[key] == pytest.approx(square, rel=0.25), key


def held_in_bf16(model: nn.Module) -> nn.Module:
    """Set parameters to values that BF16 represents, so that only a layer's result is rounded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 64).round() / 64)
    return model


@pytest.mark.parametrize("representable", [False, True])
def test_gates_behind_an_operator_flip_where_its_errors_move_them(representable: bool) -> None:
    """Rounding a result to nearest never changes its sign, however close it is to zero."""
    model = small_models.build(
        lambda: nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 10))
    )
    model = held_in_bf16(model) if representable else model
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 16, generator=generator) * 4).round() / 4
    looking = _SensitivityRun(Captured(model), step, ["bf16"], 0)
    with looking.at(0, (x, torch.arange(64) % 10)) as now:
        estimate, truth = SecondOrder(draws=256).look(now()), MonteCarlo().look(now())
    for key, square in truth.items():
        assert estimate[key] == pytest.approx(square, rel=0.25), key


def test_large_models_have_fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models.build(lambda: stack(nn.GELU))
    looking = _SensitivityRun(Captured(model), step, ["bf16"], 0)
    with looking.at(0, batches()[0]) as now:
        few, many = SecondOrder(draws=1).look(now()), SecondOrder(draws=3).look(now())
        monkeypatch.setattr(second_order, "PROBE_BYTES", 1)
        limited = SecondOrder(draws=3).look(now())
    assert limited == few != many
