"""Activations fused into products: bit-exact ReLU, GELU close to FP64, equal bits on every path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qsync_fx import _C
from tests.support.native.native_products import matrix, multiplied

every_isa = pytest.mark.parametrize("isa", _C.available_isas())
every_operand = pytest.mark.parametrize("operands", [torch.int8, torch.bfloat16])
ACTIVATIONS: dict[_C.Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activated(x: Tensor, activation: _C.Activation, isa: str) -> Tensor:
    """Return the activation of `x`, which is the bias of empty sums."""
    nothing = torch.zeros(0, dtype=torch.int8)
    a, b = nothing.view(1, 0), nothing.view(0, x.numel())
    return multiplied(a, b, torch.float32, bias=x, isa=isa, activation=activation)[0]


@every_isa
@every_operand
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_is_that_of_the_result(isa: str, operands: torch.dtype, dtype: torch.dtype) -> None:
    a, b = matrix(35, 70, "rows", operands), matrix(70, 37, "columns", operands)
    arguments = dtype, torch.rand(35), torch.rand(37), torch.randn(37) * 1000
    assert torch.equal(
        multiplied(a, b, *arguments, isa=isa, activation="relu"),
        torch.relu(multiplied(a, b, *arguments, isa=isa)),
    )


@every_isa
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_is_near(isa: str, activation: _C.Activation) -> None:
    """The relative error is similar to torch's (3.5e-7 and 1.1e-7)."""
    x = torch.cat(
        [
            torch.linspace(-12, 12, 200_001),
            torch.randn(10_000) * 1e-3,
            torch.tensor([1e30, -1e30, 0.0, 1e-40]),
        ]
    )
    actual, exact = activated(x, activation, isa).double(), ACTIVATIONS[activation](x.double())
    assert ((actual - exact).abs() <= 3e-7 * x.double().abs() + 2**-149).all()
    assert torch.equal(actual.float(), activated(x, activation, "scalar"))


@every_isa
@every_operand
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_follows_bias_and_is_rounded_once(
    isa: str, operands: torch.dtype, activation: _C.Activation
) -> None:
    a, b = matrix(35, 70, "rows", operands), matrix(70, 37, "columns", operands)
    arguments = torch.tensor(1e-4), None, torch.randn(37)
    wide = multiplied(a, b, torch.float32, *arguments, isa=isa, activation=activation)
    sums = multiplied(a, b, torch.float32, *arguments, isa=isa)
    assert torch.equal(wide, torch.stack([activated(row, activation, isa) for row in sums]))
    assert torch.equal(
        multiplied(a, b, torch.bfloat16, *arguments, isa=isa, activation=activation),
        wide.bfloat16(),
    )


@every_isa
def test_nan_is_preserved(isa: str) -> None:
    odd = torch.tensor([float("nan"), float("inf")])
    for activation in ACTIVATIONS:
        result = activated(odd, activation, isa)
        assert result[0].isnan() and result[1] == float("inf")


def test_sums_have_no_activation() -> None:
    a = torch.zeros(2, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match="int32"):
        multiplied(a, a, torch.int32, activation="relu")
    with pytest.raises(ValueError, match="silu"):
        multiplied(a, a, torch.float32, activation="silu")  # type: ignore[arg-type]
