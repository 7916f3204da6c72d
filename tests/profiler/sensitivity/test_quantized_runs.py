"""Sensitivities of a model, compared with quantized runs of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.predictor.indicator.sensitivity_map import agreement
from qsync_fx.profiler.sensitivity.estimate import several
from qsync_fx.profiler.tensor_capture.graph_capture import Captured
from tests.support import tiers
from tests.support.models import small_models
from tests.support.planning.looked_models import batches, step, wide


def test_exact_converges_for_a_network_of_gates() -> None:
    model = small_models.build(lambda: wide(nn.ReLU))
    result = agreement(
        *several(
            model, step, batches(), ["second_order", "monte_carlo"], ["int8"], steps=4, fraction=1.0
        ),
        "int8",
    )
    assert 0.5 < result.ratio < 2, result


@tiers.ALL
@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
def test_exact_and_injected_equal_quantized_runs(activation: type[nn.Module]) -> None:
    """In a ReLU network, flipped gates cause most of the error, not second derivatives."""
    model = small_models.build(lambda: wide(activation))
    sensitivities = several(
        model,
        step,
        batches(),
        ["second_order", "injected", "monte_carlo"],
        ["int8"],
        steps=12,
        fraction=1.0,
    )
    exact, injected, truth = sensitivities
    for estimate in (exact, injected):
        result = agreement(estimate, truth, "int8")
        assert result.operators == 5
        assert 0.6 < result.ratio < 1.6, result
        assert result.spearman >= (0.9 if estimate is exact else 0.7), result


@tiers.ALL
def test_variances_of_two_operators_add_up() -> None:
    from qsync_fx.plan import Plan
    from qsync_fx.profiler.sensitivity.estimate import _SensitivityRun
    from qsync_fx.profiler.sensitivity.monte_carlo import lowered

    model = small_models.build(lambda: wide(nn.GELU))
    looking = _SensitivityRun(Captured(model), step, ["int8"], 0)
    with looking.at(0, batches()[0]) as now:
        gradient_step, exact = now(), now().gradients()

        def square(*names: str) -> float:
            plan = Plan("fp32", operators=dict.fromkeys(names, "int8"))
            return gradient_step.square_error(lowered(plan), exact, 200)

        for pair in (("0/linear", "4/linear"), ("2/linear", "8/linear")):
            assert square(*pair) / (square(pair[0]) + square(pair[1])) == pytest.approx(1, abs=0.25)


@tiers.ALL
def test_the_error_grows_with_the_square_of_the_step_and_at_gates_with_the_step() -> None:
    """E5M2 has one mantissa bit less than E4M3: 4 times the variance with GELU, 2 with ReLU."""

    def growth(activation: Callable[[], nn.Module]) -> float:
        model = small_models.build(lambda: wide(activation))
        (sensitivity,) = several(
            model, step, batches(), ["second_order"], ["fp8", "fp8_e5m2"], steps=6, fraction=1.0
        )
        first = "2/linear"
        return sensitivity.of(first, "fp8_e5m2") / sensitivity.of(first, "fp8")

    assert growth(nn.GELU) > 3.3
    assert 1.5 < growth(nn.ReLU) < 3.3


class Residual(nn.Module):
    """A residual sum, whose operands receive the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + self.second(torch.tanh(h)))


def test_an_error_in_a_gradient_counts_for_its_operator_alone() -> None:
    from qsync_fx.profiler.sensitivity.estimate import _SensitivityRun
    from qsync_fx.profiler.sensitivity.noise_injection import Injected
    from qsync_fx.profiler.sensitivity.second_order import SecondOrder

    model = small_models.build(Residual)
    looking = _SensitivityRun(Captured(model), step, ["bf16"], 0)
    with looking.at(0, batches()[0]) as now:
        exact, injected = SecondOrder(draws=256).look(now()), Injected().look(now())
    assert exact.keys() == injected.keys()
    for key, square in injected.items():
        assert exact[key] / square == pytest.approx(1, abs=0.3), key


class Unrecorded(nn.Module):
    """A model that computes a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.last(h)


def test_operators_under_no_grad_add_variance() -> None:
    model = small_models.build(Unrecorded)
    result = agreement(
        *several(
            model, step, batches(), ["second_order", "monte_carlo"], ["int8"], steps=4, fraction=1.0
        ),
        "int8",
    )
    assert result.operators == 2 and 0.5 < result.ratio < 2, result


@tiers.ALL
def test_frozen_layers_and_inputs_without_gradients_still_make_noise() -> None:
    model = wide(nn.GELU)
    for parameter in (*model[0].parameters(), *model[2].parameters()):
        parameter.requires_grad_(False)
    sensitivities = several(
        model, step, batches(), ["second_order", "monte_carlo"], ["int8"], steps=8, fraction=1.0
    )
    result = agreement(*sensitivities, "int8")
    assert result.spearman >= 0.9 and 0.5 < result.ratio < 2
