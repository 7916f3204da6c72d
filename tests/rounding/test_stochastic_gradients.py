"""Option `gradient_rounding`: 16-bit gradients whose mean over many roundings equals the FP32
gradient.

`test_unbiased.greatest_z` computes the distance of a mean from its expectation. Roundings start
from FP32 gradients, and the forward pass rounds to nearest, so the option is the only source of
randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_unbiased import LARGEST_Z, greatest_z
from torch import Tensor, nn

from qsync_fx.backend.numerics import reference
from qsync_fx.backend.operators.product_utils import round_gradients
from qsync_fx.backend.operators.quantize import gridded_format, quantize, round_to
from tests.support import tiers
from tests.support.models.small_models import build, compiled

DRAWS = 250
SEED = torch.tensor([0])
HOW: dict[str, Any] = {"gradient_rounding": "stochastic", "rounding": "nearest"}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Transposed(nn.Module):
    """Layer whose product is an `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight, self.layer.bias = (
            nn.Parameter(torch.randn(4, 9)),
            nn.Parameter(torch.randn(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.layer.bias, x, self.layer.weight.t())


class Written(nn.Module):
    """Product with a weight `[K, N]`, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight, self.layer.bias = (
            nn.Parameter(torch.randn(9, 4)),
            nn.Parameter(torch.randn(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight + self.layer.bias


class Conv(nn.Module):
    """Convolution with a stride of 2, for which some taps of the kernel read only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


LAYERS: dict[type[nn.Module], tuple[int, ...]] = {
    Linear: (6, 9),
    Transposed: (6, 9),
    Written: (6, 9),
    Conv: (2, 3, 4, 1),
}


def values(t: Tensor, fmt: str) -> Tensor:
    """Return the operand values of a layer in a format, in FP64."""
    if fmt == "bf16":
        return t.detach().bfloat16().double()
    q, scale = quantize(t.detach(), SEED, 0, fmt, "nearest", [])
    return q.double() * scale.double()


def draws(
    run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, gradient: Tensor
) -> Iterator[list[Tensor]]:
    for _ in range(DRAWS):
        yield list(torch.autograd.grad(run(x), (x, layer.weight, layer.bias), gradient))


def under_inductor(make: type[nn.Module], fmt: str) -> Any:
    """Return a parameter whose tier is all for each layer in BF16 and for Linear in each format."""
    marks = tiers.ALL if fmt == "bf16" or make is Linear else tiers.EVERY
    return pytest.param(make, fmt, "inductor", marks=marks)


@tiers.one_in(2)
@pytest.mark.parametrize(
    ("make", "fmt", "inner_backend"),
    [
        *(
            (make, fmt, inner_backend)
            for inner_backend in ("eager", "aot_eager")
            for fmt in ("bf16", "int8")
            for make in LAYERS
        ),
        *(under_inductor(make, fmt) for fmt in ("bf16", "int8") for make in LAYERS),
    ],
)
def test_gradients_are_right_on_average(
    make: type[nn.Module], fmt: str, inner_backend: str
) -> None:
    """Check layers with an FP32 input, and thus an FP32 input gradient: the incoming gradient is
    rounded, the product is not.
    """
    model = build(make)
    x, layer = torch.randn(LAYERS[make], requires_grad=True), model.layer
    gradient = torch.randn_like(model(x))
    operands = [values(t, fmt).requires_grad_() for t in (x, layer.weight)]
    if inner_backend == "inductor" and fmt == "bf16":
        # Inductor recomputes the narrow weight in the backward kernel that widens it, and removes
        # both conversions.
        operands[1] = layer.weight.detach().double()
    exact_layer = build(make).double()
    with torch.no_grad():
        exact_layer.layer.weight.copy_(operands[1])
    leaves = operands[0], exact_layer.layer.weight, exact_layer.layer.bias
    exact = torch.autograd.grad(exact_layer(operands[0]), leaves, gradient.double())
    for rounding in ("stochastic", "nearest"):
        torch._dynamo.reset()
        run = compiled(
            model,
            precision=fmt,
            inner_backend=inner_backend,
            **{**HOW, "gradient_rounding": rounding},
        )
        z_values = [
            greatest_z(d, e)
            for d, e in zip(zip(*draws(run, layer, x, gradient), strict=True), exact, strict=True)
        ]
        # If the output is FP32, as for INT8, the bias gradient is summed before the first rounding.
        checked = z_values if fmt == "bf16" and make is not Written else z_values[:2]
        assert (
            max(z_values) < LARGEST_Z if rounding == "stochastic" else min(checked) > 3 * LARGEST_Z
        ), (rounding, z_values)


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_a_gradient_that_stays_in_bf16_is_rounded_from_its_sum_in_fp32(fmt: str) -> None:
    """Check the first layer's gradient, which is right on average although the gradient of the
    second layer's input is BF16, like the input.
    """
    first, second = (nn.Linear(*sizes, bias=False) for sizes in ((9, 8), (8, 5)))
    model = nn.Sequential(first, nn.ReLU(), second)
    x, gradient = torch.randn(16, 9), torch.randn(16, 5).bfloat16().float()
    operands = [values(t, fmt) for t in (x, first.weight, second.weight)]
    open_gates = operands[0] @ operands[1].t() > 0
    exact = ((gradient.double() @ operands[2]) * open_gates).t() @ operands[0]
    for rounding in ("stochastic", "nearest"):
        torch._dynamo.reset()
        run = compiled(
            lambda x: model(x),
            precision=fmt,
            inner_backend="eager",
            **{**HOW, "gradient_rounding": rounding},
        )
        z = greatest_z(
            (torch.autograd.grad(run(x), first.weight, gradient)[0] for _ in range(DRAWS)), exact
        )
        assert z < LARGEST_Z if rounding == "stochastic" else z > 3 * LARGEST_Z


@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_to_torch_dtypes(fmt: str, dtype: torch.dtype) -> None:
    """Check that nearest rounding equals torch's conversion bit for bit, and stochastic rounding
    returns one of both neighbours, or infinity beyond the range.
    """
    torch.manual_seed(0)
    limit = torch.finfo(dtype).max
    special = [
        0.0,
        -0.0,
        limit,
        -limit,
        1.01 * limit,
        -torch.inf,
        torch.inf,
        torch.nan,
        torch.finfo(dtype).smallest_normal / 3,
    ]
    x = torch.cat([torch.randn(999) * torch.randn(999).mul(4).exp(), torch.tensor(special)])
    nearest = round_to(x, SEED, 0, fmt, "nearest")
    assert nearest.dtype is dtype
    assert torch.equal(nearest.view(torch.int16)[:-2], x.to(dtype).view(torch.int16)[:-2])
    assert nearest[-2].isnan()
    below, above = round_to(x, SEED, 0, fmt, "floor"), -round_to(-x, SEED, 0, fmt, "floor")
    drawn = torch.stack(
        [round_to(x, torch.tensor([seed]), 0, fmt, "stochastic") for seed in range(DRAWS)]
    )
    assert ((drawn == below) | (drawn == above) | x.isnan()).all()
    rounded = (below != above) & below.isfinite() & above.isfinite()
    assert greatest_z((d[rounded] for d in drawn), x[rounded].double()) < LARGEST_Z
    in_torch = reference.round_to(x, SEED, 3, gridded_format(fmt, x), "stochastic")
    assert torch.equal(
        round_to(x, SEED, 3, fmt, "stochastic").nan_to_num(1, 2, 3), in_torch.nan_to_num(1, 2, 3)
    )


def test_operator_of_a_package_requests_stochastic_gradients() -> None:
    gradient = torch.randn(64, 64)
    folds = {"activation": None}
    to_nearest, _ = round_gradients(gradient, folds, SEED, 0, "int8", "stochastic")["activation"]  # type: ignore[arg-type]
    drawn, _ = round_gradients(gradient, folds, SEED, 0, "int8", "nearest", gradients="stochastic")[
        "activation"
    ]  # type: ignore[arg-type]
    assert torch.equal(to_nearest, gradient.bfloat16())
    assert not torch.equal(drawn, to_nearest)
    assert (drawn - gradient).abs().max() <= 2**-7 * gradient.abs().max()


def test_widen_is_an_operator_that_torch_accepts() -> None:
    x = torch.randn(4, 5).bfloat16().requires_grad_()
    torch.library.opcheck(torch.ops.qsync.widen.default, (x, SEED, 0, torch.float32))
    assert torch.equal(torch.ops.qsync.widen.default(x, SEED, 0, torch.float32), x.float())
