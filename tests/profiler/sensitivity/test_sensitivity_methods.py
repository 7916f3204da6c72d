"""Sensitivity methods, compared with closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.formats import FORMATS
from qsync_fx.predictor.indicator import formulas
from qsync_fx.predictor.indicator.rounding_variance import noise
from qsync_fx.profiler.sensitivity.estimate import several
from tests.support import tiers
from tests.support.models import small_models
from tests.support.planning.looked_models import batches, step, wide


def half_square(model: Any, batch: Tensor) -> Tensor:
    return 0.5 * model(batch).square().sum()


@tiers.ALL
def test_gradients_of_one_layer_equal_the_closed_form() -> None:
    """With half the squared output as loss, H and J are constant: all terms have a closed form."""
    layer = nn.Linear(24, 8, bias=False)
    x = torch.randn(40, 24)
    (exact,) = several(layer, half_square, [x], ["second_order"], ["int8"], steps=300, fraction=1.0)
    w = layer.weight.detach()
    vx, vw = noise(x, FORMATS["int8"]), noise(w, FORMATS["int8"])
    y = x @ w.t()
    # The gradient y'x of w changes by (dx w')'x + y'dx + (x dw')'x. Rounding to BF16 adds a
    # thousandth of this.
    wanted = 0.0
    gram = x.t() @ x
    wanted += float((vw.sum(0) * gram.square().sum(1)).sum())
    weight_gram = (w.t() @ w).diagonal()
    for n in range(len(x)):
        cross = 2 * (w.t() @ y[n]) * x[n]
        wanted += float(
            (vx[n] * (weight_gram * x[n].square().sum() + y[n].square().sum() + cross)).sum()
        )
    assert exact.of("/linear", "int8") / wanted == pytest.approx(1, abs=0.05)


@tiers.ALL
def test_hessian_gives_the_largest_eigenvalue() -> None:
    import benchmarks.support.indicators  # noqa: F401 - registers "hessian"

    layer = nn.Linear(6, 1, bias=False)
    x = torch.randn(50, 6)
    (result,) = several(layer, half_square, [x], ["hessian"], ["int8"], steps=12, fraction=1.0)
    largest = float(torch.linalg.eigvalsh(x.t() @ x)[-1])
    wanted = largest / 6 * float(noise(layer.weight, FORMATS["int8"]).sum())
    assert result.trace[-1]["/linear"]["int8"] == pytest.approx(wanted, rel=0.02)


def test_random_halves_with_each_wider_precision_and_stays() -> None:
    import benchmarks.support.indicators  # noqa: F401 - registers "random"

    model = small_models.build(lambda: wide(nn.ReLU))
    (result,) = several(model, step, batches(), ["random"], ["bf16", "int8"], steps=3)
    for by in result.variance.values():
        assert by["bf16"] == by["int8"] / 2 > 0
    assert result.trace[0] == result.trace[2] == result.variance


def test_the_trace_of_a_model_that_trains() -> None:
    """QSync, Fig. 8: ranks over the first updates.

    Without an optimizer, the same batch gives the same values, except for the probes.
    """
    model = small_models.build(lambda: wide(nn.ReLU))
    data = batches()[:1]
    (still,) = several(model, step, data, ["paper"], ["int8"], steps=3)
    (trained,) = several(
        model,
        step,
        data,
        ["paper"],
        ["int8"],
        steps=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
    )
    assert still.trace[0] == still.trace[1] == trained.trace[0] != trained.trace[1]
    assert all(len(values) == 5 for values in trained.trace)


def test_unary_operators_of_the_paper_have_no_backward_variance() -> None:
    """QSync, below Eq. (5): a unary operator has the variance of its input, in the forward pass."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4))
    x = torch.randn(12, 8)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return 100 * model(batch).square().mean()

    (result,) = several(model, loss, [x], ["paper"], ["bf16"], steps=1, fraction=1.0)
    bf16 = FORMATS["bf16"]
    scores = formulas.moments(model[0](x), bf16).spread / 6
    # gamma is the derivative of a mean over 12 samples; softmax is the second of three operators.
    assert result.of("1/softmax", "bf16") == pytest.approx(2 * scores / 12**2, rel=1e-6)
