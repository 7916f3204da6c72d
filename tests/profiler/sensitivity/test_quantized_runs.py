"""What is seen of a model's sensitivity is what quantized runs of it do."""

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
    held = agreement(
        *several(
            model, step, batches(), ["second_order", "monte_carlo"], ["int8"], steps=4, fraction=1.0
        ),
        "int8",
    )
    assert 0.5 < held.ratio < 2, held


@tiers.ALL
@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
def test_exact_and_injected_equal_quantized_runs(activation: type[nn.Module]) -> None:
    """Of a network of ReLUs second derivatives alone tell a small part: gates flip."""
    model = small_models.build(lambda: wide(activation))
    found = several(
        model,
        step,
        batches(),
        ["second_order", "injected", "monte_carlo"],
        ["int8"],
        steps=12,
        fraction=1.0,
    )
    exact, injected, truth = found
    for one in (exact, injected):
        held = agreement(one, truth, "int8")
        assert held.operators == 5
        assert 0.6 < held.ratio < 1.6, held
        assert held.spearman >= (0.9 if one is exact else 0.7), held


@tiers.ALL
def test_variances_of_two_operators_add_up() -> None:
    from qsync_fx.plan import Plan
    from qsync_fx.profiler.sensitivity.estimate import _SensitivityRun
    from qsync_fx.profiler.sensitivity.monte_carlo import lowered

    model = small_models.build(lambda: wide(nn.GELU))
    looking = _SensitivityRun(Captured(model), step, ["int8"], 0)
    with looking.at(0, batches()[0]) as now:
        one, exact = now(), now().gradients()

        def square(*names: str) -> float:
            plan = Plan("fp32", operators=dict.fromkeys(names, "int8"))
            return one.square_error(lowered(plan), exact, 200)

        for pair in (("0/linear", "4/linear"), ("2/linear", "8/linear")):
            assert square(*pair) / (square(pair[0]) + square(pair[1])) == pytest.approx(1, abs=0.25)


@tiers.ALL
def test_the_error_grows_with_the_square_of_the_step_and_at_gates_with_the_step() -> None:
    """Formats of one bit less: FP8's mantissas.

    With GELU four times the error, with ReLU twice as much and more.
    """

    def growth(activation: Callable[[], nn.Module]) -> float:
        model = small_models.build(lambda: wide(activation))
        (found,) = several(
            model, step, batches(), ["second_order"], ["fp8", "fp8_e5m2"], steps=6, fraction=1.0
        )
        first = "2/linear"
        return found.of(first, "fp8_e5m2") / found.of(first, "fp8")

    assert growth(nn.GELU) > 3.3
    assert 1.5 < growth(nn.ReLU) < 3.3


class Residual(nn.Module):
    """A sum hands one and the same gradient to both of its operands."""

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
    """A part that the model computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.last(h)


def test_operators_under_no_grad_add_variance() -> None:
    model = small_models.build(Unrecorded)
    held = agreement(
        *several(
            model, step, batches(), ["second_order", "monte_carlo"], ["int8"], steps=4, fraction=1.0
        ),
        "int8",
    )
    assert held.operators == 2 and 0.5 < held.ratio < 2, held


@tiers.ALL
def test_frozen_layers_and_inputs_without_gradients_still_make_noise() -> None:
    model = wide(nn.GELU)
    for parameter in (*model[0].parameters(), *model[2].parameters()):
        parameter.requires_grad_(False)
    found = several(
        model, step, batches(), ["second_order", "monte_carlo"], ["int8"], steps=8, fraction=1.0
    )
    held = agreement(*found, "int8")
    assert held.spearman >= 0.9 and 0.5 < held.ratio < 2
