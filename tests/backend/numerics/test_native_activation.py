"""Activations that products give out: ReLU to the bit, GELU near FP64's, and the same bits on every
path.
"""

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


def activated(x: Tensor, how: _C.Activation, isa: str) -> Tensor:
    """Returns an activation of any numbers: a bias is what sums of nothing come to."""
    nothing = torch.zeros(0, dtype=torch.int8)
    a, b = nothing.view(1, 0), nothing.view(0, x.numel())
    return multiplied(a, b, torch.float32, bias=x, isa=isa, activation=how)[0]


@every_isa
@every_operand
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_is_that_of_the_result(isa: str, operands: torch.dtype, dtype: torch.dtype) -> None:
    a, b = matrix(35, 70, "rows", operands), matrix(70, 37, "columns", operands)
    how = dtype, torch.rand(35), torch.rand(37), torch.randn(37) * 1000
    assert torch.equal(
        multiplied(a, b, *how, isa=isa, activation="relu"),
        torch.relu(multiplied(a, b, *how, isa=isa)),
    )


@every_isa
@pytest.mark.parametrize("how", ["gelu", "gelu_tanh"])
def test_gelu_is_near(isa: str, how: _C.Activation) -> None:
    """As near as torch's, which is off by 3.5 and 1.1 units of 1e-7 of the value."""
    x = torch.cat(
        [
            torch.linspace(-12, 12, 200_001),
            torch.randn(10_000) * 1e-3,
            torch.tensor([1e30, -1e30, 0.0, 1e-40]),
        ]
    )
    found, exact = activated(x, how, isa).double(), ACTIVATIONS[how](x.double())
    assert ((found - exact).abs() <= 3e-7 * x.double().abs() + 2**-149).all()
    assert torch.equal(found.float(), activated(x, how, "scalar"))


@every_isa
@every_operand
@pytest.mark.parametrize("how", ["gelu", "gelu_tanh"])
def test_gelu_follows_bias_and_is_rounded_once(
    isa: str, operands: torch.dtype, how: _C.Activation
) -> None:
    a, b = matrix(35, 70, "rows", operands), matrix(70, 37, "columns", operands)
    given = torch.tensor(1e-4), None, torch.randn(37)
    wide = multiplied(a, b, torch.float32, *given, isa=isa, activation=how)
    sums = multiplied(a, b, torch.float32, *given, isa=isa)
    assert torch.equal(wide, torch.stack([activated(row, how, isa) for row in sums]))
    assert torch.equal(
        multiplied(a, b, torch.bfloat16, *given, isa=isa, activation=how), wide.bfloat16()
    )


@every_isa
def test_nan_is_preserved(isa: str) -> None:
    odd = torch.tensor([float("nan"), float("inf")])
    for how in ACTIVATIONS:
        found = activated(odd, how, isa)
        assert found[0].isnan() and found[1] == float("inf")


def test_sums_have_no_activation() -> None:
    a = torch.zeros(2, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match="int32"):
        multiplied(a, a, torch.int32, activation="relu")
    with pytest.raises(ValueError, match="silu"):
        multiplied(a, a, torch.float32, activation="silu")  # type: ignore[arg-type]
