"""Products of an activation and a parameter, in many spellings: outputs and gradients equal those
of a layer in each format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.formats import FORMATS
from tests.support import tiers
from tests.support.computing.products_in_fp64 import Product
from tests.support.computing.weight_products import SEED, adjustable


@dataclass(frozen=True)
class Case:
    """Product of an activation `x` and a parameter `w`, with an optional bias.

    Attributes:
        product: the product without the bias.
        summed: the contracted dimensions of x and of w.
        stacked: the batch dimensions of x, w and the result.
        call: the product with the bias, if any.
    """

    product: Callable[..., Tensor]
    x: tuple[int, ...]
    w: tuple[int, ...]
    summed: tuple[Sequence[int], Sequence[int]]
    stacked: tuple[Sequence[int], ...] = ((), (), ())
    bias: tuple[int, ...] | None = None
    call: Callable[..., Tensor] | None = None
    strided: bool = False


CASES = {
    "x @ w": Case(lambda x, w: x @ w, (3, 7), (7, 5), ([1], [0])),
    "3-D x @ w": Case(lambda x, w: x @ w, (2, 3, 7), (7, 5), ([2], [0])),
    "x @ w.t()": Case(lambda x, w: x @ w.t(), (2, 3, 7), (5, 7), ([2], [1])),
    "one row": Case(lambda x, w: x @ w, (1, 8), (8, 16), ([1], [0])),
    "one summand": Case(lambda x, w: x @ w, (4, 1), (1, 5), ([1], [0])),
    "no rows": Case(lambda x, w: x @ w, (0, 7), (7, 5), ([1], [0])),
    "no batch": Case(lambda x, w: x @ w, (2, 0, 7), (7, 5), ([2], [0])),
    "vector @ w": Case(lambda x, w: x @ w, (7,), (7, 5), ([0], [0])),
    "w @ x": Case(lambda x, w: w @ x, (7, 3), (5, 7), ([0], [1])),
    "w @ 3-D x": Case(lambda x, w: w @ x, (2, 7, 3), (5, 7), ([1], [1])),
    "w @ vector": Case(lambda x, w: w @ x, (7,), (5, 7), ([0], [1])),
    "mm": Case(torch.mm, (3, 7), (7, 5), ([1], [0])),
    "strided mm": Case(torch.mm, (3, 7), (7, 5), ([1], [0]), strided=True),
    "mv": Case(lambda x, w: torch.mv(w, x), (7,), (5, 7), ([0], [1])),
    "inner": Case(torch.inner, (2, 3, 7), (5, 7), ([2], [1])),
    "tensordot": Case(
        lambda x, w: torch.tensordot(x, w, 2), (3, 2, 7), (2, 7, 5), ([1, 2], [0, 1])
    ),
    "addmm": Case(
        torch.mm, (3, 7), (7, 5), ([1], [0]), bias=(5,), call=lambda x, w, b: torch.addmm(b, x, w)
    ),
    "addmv": Case(
        lambda x, w: w @ x,
        (7,),
        (5, 7),
        ([0], [1]),
        bias=(5,),
        call=lambda x, w, b: torch.addmv(b, w, x),
    ),
    "bmm": Case(torch.bmm, (4, 3, 7), (4, 7, 5), ([2], [1]), ([0], [0], [0])),
    "strided bmm": Case(torch.bmm, (4, 3, 7), (4, 7, 5), ([2], [1]), ([0], [0], [0]), strided=True),
    "bmm of no rows": Case(torch.bmm, (4, 0, 7), (4, 7, 5), ([2], [1]), ([0], [0], [0])),
    "bmm, w first": Case(
        lambda x, w: torch.bmm(w, x), (4, 7, 3), (4, 5, 7), ([1], [2]), ([0], [0], [0])
    ),
    "baddbmm": Case(
        torch.bmm,
        (4, 3, 7),
        (4, 7, 5),
        ([2], [1]),
        ([0], [0], [0]),
        (4, 1, 5),
        lambda x, w, b: torch.baddbmm(b, x, w),
    ),
    "experts of a batch": Case(
        lambda x, w: x @ w, (2, 4, 3, 7), (4, 7, 5), ([3], [1]), ([1], [0], [1])
    ),
    "one x for all experts": Case(lambda x, w: x @ w, (1, 3, 7), (4, 7, 5), ([2], [1])),
    "einsum": Case(lambda x, w: torch.einsum("bld,dh->blh", x, w), (2, 3, 7), (7, 5), ([2], [0])),
    "einsum into heads": Case(
        lambda x, w: torch.einsum("ibh,hnd->ibnd", x, w), (3, 2, 7), (7, 2, 5), ([2], [0])
    ),
    "einsum of heads": Case(
        lambda x, w: torch.einsum("ibnd,hnd->ibh", x, w), (3, 2, 2, 5), (7, 2, 5), ([2, 3], [1, 2])
    ),
    "einsum of experts": Case(
        lambda x, w: torch.einsum("...ecd,edh->...hec", x, w),
        (2, 4, 3, 7),
        (4, 7, 5),
        ([3], [1]),
        ([1], [0], [2]),
    ),
    "einsum, w first": Case(
        lambda x, w: torch.einsum("oi,bit", w, x), (2, 7, 3), (5, 7), ([1], [1])
    ),
}


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.w = nn.Parameter(torch.randn(case.w))
        self.b = nn.Parameter(torch.randn(case.bias)) if case.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.b is None:
            return self.case.product(x, self.w)
        assert self.case.call is not None
        return self.case.call(x, self.w, self.b)


def activation(case: Case) -> Tensor:
    x = (
        torch.randn(tuple(reversed(case.x))).permute(*reversed(range(len(case.x))))
        if case.strided
        else None
    )
    return (torch.randn(case.x) if x is None else x).requires_grad_()


def others(dims: int, without: Sequence[int]) -> list[int]:
    return [dim for dim in range(dims) if dim not in without]


def ones(shape: Sequence[int], summed: Sequence[int]) -> Tensor:
    return torch.ones(
        [1 if dim in summed else size for dim, size in enumerate(shape)], dtype=torch.float64
    )


def to_x(case: Case, g: Tensor, w: Tensor) -> Tensor:
    x = torch.zeros(case.x, dtype=g.dtype, requires_grad=True)
    return torch.autograd.grad(case.product(x, w), x, g)[0]


def to_w(case: Case, g: Tensor, x: Tensor) -> Tensor:
    w = torch.zeros(case.w, dtype=g.dtype, requires_grad=True)
    return torch.autograd.grad(case.product(x, w), w, g)[0]


@tiers.one_in(3)
@pytest.mark.parametrize("scaling", ["tensor", "channel"])
@pytest.mark.parametrize("fmt", ["int8", "fp8", "int8_grad"])
@pytest.mark.parametrize("name", CASES)
def test_a_product_with_a_parameter_is_that_of_a_layer(name: str, fmt: str, scaling: str) -> None:
    case, row = CASES[name], FORMATS[fmt]
    torch.manual_seed(len(name))
    net, x = Net(case), activation(case)
    if (fmt, scaling) == ("int8", "tensor"):  # other cases differ from BF16 in their numbers
        explanation = qsync_fx.explain(net, x, options={"precision": fmt})
        assert [each[1:] for each in adjustable(explanation)] == [(fmt, f"plan: uniform {fmt}")]
    options = {
        "precision": fmt,
        "scaling": scaling,
        "rounding": "nearest",
        "inner_backend": "aot_eager",
    }
    y = torch.compile(net, backend="qsync", options=options)(x)
    g = torch.randn_like(y)
    expected = net(x)
    assert (
        y.dtype == torch.float32 and y.shape == expected.shape and y.stride() == expected.stride()
    )
    gradients = torch.autograd.grad(y, [x, *net.parameters()], g)

    def operand(t: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        summed, stacked = case.summed[factor], case.stacked[factor]
        keep = others(t.dim(), summed) if scaling == "channel" else list(stacked)
        q, scale = quantize(t.detach(), SEED, 0, fmt, "nearest", keep)
        return q.double(), scale.double()

    (xq, x_scale), (wq, w_scale) = operand(x, 0), operand(net.w, 1)
    wide = None if row.kind == "integer" else torch.float32
    bias = None if net.b is None else net.b.detach()
    Product.of(case.product, xq * x_scale, wq * w_scale, bias).assert_met(y, wide)

    def rounded(fold: Tensor | None) -> Tensor:
        """Round the incoming gradient, times a scale that varies along contracted dimensions."""
        value = g if fold is None else g * fold.float()
        gradient = row.gradient
        if not gradient.scaled:
            return value.to(gradient.dtype).double()
        q, scale = quantize(value, SEED, 0, gradient.name, "nearest", list(case.stacked[2]))
        return q.double() * scale.double()

    channel = scaling == "channel"
    at_x, at_w = ones(case.x, case.summed[0]), ones(case.w, case.summed[1])
    for_x = rounded(case.product(at_x, at_w * w_scale) if channel and _varies(case, 1) else None)
    for_w = rounded(case.product(at_x * x_scale, at_w) if channel and _varies(case, 0) else None)
    narrow = None if row.gradient.name == "int8" else torch.bfloat16
    left_w = wq if channel and _varies(case, 1) else wq * w_scale
    left_x = xq if channel and _varies(case, 0) else xq * x_scale
    Product.of(lambda g, w: to_x(case, g, w), for_x, left_w).assert_met(gradients[0], narrow)
    Product.of(lambda g, x: to_w(case, g, x), for_w, left_x).assert_met(gradients[1], narrow)
    if net.b is not None:
        torch.testing.assert_close(gradients[2], g.sum_to_size(net.b.shape))


def _varies(case: Case, factor: int) -> bool:
    shape = (case.x, case.w)[factor]
    return bool(others(len(shape), [*case.summed[factor], *case.stacked[factor]]))


@pytest.mark.parametrize("name", CASES)
def test_bf16_product_equals_torch(name: str) -> None:
    case = CASES[name]
    net, x = Net(case), activation(case)
    y = torch.compile(
        net, backend="qsync", options={"precision": "bf16", "inner_backend": "aot_eager"}
    )(x)
    g = torch.randn_like(y)
    actual = [y, *torch.autograd.grad(y, [x, *net.parameters()], g)]
    inputs = [t.detach().bfloat16().requires_grad_() for t in (x, *net.parameters())]
    expected = (case.call or case.product)(*inputs)
    gradients = torch.autograd.grad(expected, inputs, g.bfloat16())
    for result, other in zip(actual, [expected, *gradients], strict=True):
        torch.testing.assert_close(result, other.float(), rtol=0, atol=0)
