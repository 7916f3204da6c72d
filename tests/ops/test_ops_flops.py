"""FLOP counts of the operator table, compared with torch's, on random and symbolic shapes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from qsync_fx.ops import row_for
from tests.support.computing.operator_samples import Call
from tests.support.tiers import chosen

aten = torch.ops.aten
sizes = st.integers(1, 5)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@st.composite
def convolutions(draw: st.DrawFn) -> Call:
    dimensions, groups, transposed = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )
    inner, outer = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape = [draw(st.integers(3, 6)) for _ in range(dimensions)]
    weight = [inner, outer // groups] if transposed else [outer, inner // groups]
    values = (
        t(draw(sizes), inner, *shape),
        t(*weight, *[kernel] * dimensions),
        draw(st.sampled_from([None, t(outer)])),
    )
    strides, zeros, ones = [stride] * dimensions, [0] * dimensions, [1] * dimensions
    if draw(st.booleans()):
        return Call(
            aten.convolution.default, (*values, strides, zeros, ones, transposed, zeros, groups), {}
        )
    if transposed:
        overload = aten.conv_transpose1d.default if dimensions == 1 else None
        overload = overload or getattr(aten, f"conv_transpose{dimensions}d").input
        return Call(overload, (*values, strides, zeros, zeros, groups), {})
    return Call(
        getattr(aten, f"conv{dimensions}d").default, (*values, strides, zeros, ones, groups), {}
    )


@st.composite
def products(draw: st.DrawFn) -> Call:
    b, n, k, m = (draw(sizes) for _ in range(4))
    # If the result is one number, or the summed dimension has size 1, `inner` and `tensordot`
    # multiply elementwise, which torch does not count.
    p, q, r = (draw(st.integers(2, 5)) for _ in range(3))
    return draw(
        st.sampled_from(
            [
                Call(aten.linear.default, (t(b, n, k), t(m, k), t(m)), {}),
                Call(aten.linear.default, (t(n, k), t(m, k)), {}),
                Call(aten.addmm.default, (t(m), t(n, k), t(k, m)), {}),
                Call(aten.mm.default, (t(n, k), t(k, m)), {}),
                Call(aten.bmm.default, (t(b, n, k), t(b, k, m)), {}),
                Call(aten.baddbmm.default, (t(b, n, m), t(b, n, k), t(b, k, m)), {}),
                Call(aten.matmul.default, (t(b, n, k), t(k, m)), {}),
                Call(aten.matmul.default, (t(b, 1, n, k), t(3, k, m)), {}),
                Call(aten.linalg_matmul.default, (t(n, k), t(k, m)), {}),
                Call(aten.inner.default, (t(r, p), t(m, p)), {}),
                Call(aten.tensordot.default, (t(r, p, q), t(q, m, p), [1, 2], [2, 0]), {}),
                Call(aten.linalg_multi_dot.default, ([t(n, k), t(k, m)],), {}),
                Call(aten.linalg_multi_dot.default, ([t(k), t(k, m)],), {}),
                Call(aten.chain_matmul.default, ([t(n, k), t(k, m)],), {}),
            ]
        )
    )


@st.composite
def attentions(draw: st.DrawFn) -> Call:
    b, h, q, k, e, v = (draw(sizes) for _ in range(6))
    groups = draw(st.integers(1, 3))
    values = (t(b, h * groups, q, e), t(b, h, k, e), t(b, h, k, v))
    return Call(aten.scaled_dot_product_attention.default, values, {"enable_gqa": groups > 1})


EQUATIONS = ("bij,bjk->bik", "bhid,bhjd->bhij", "ij,kj", "bld,lrd->blr", "...ij,...jk->...ik",
"abc,cd,de->abe", "ijk,k->ij",
             "ij,jl,il->i")  # fmt: skip


@st.composite
def contractions(draw: st.DrawFn) -> Call:
    equation = draw(st.sampled_from(EQUATIONS))
    size = {label: draw(st.integers(2, 5)) for label in "abcdehijklr"}
    hidden = [draw(st.integers(2, 4)) for _ in range(2)]
    terms = equation.partition("->")[0].split(",")
    shapes = [
        (hidden if "..." in term else []) + [size[c] for c in term.replace("...", "")]
        for term in terms
    ]
    return Call(aten.einsum.default, (equation, [t(*shape) for shape in shapes]), {})


def counted(call: Call) -> int:
    # For attention, torch counts the products of the math kernel, but none of the CPU's fused
    # kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        call.target(*call.args, **call.kwargs)
    return counter.get_total_flops()


def stated(call: Call) -> Any:
    row = row_for(call.target)
    assert row is not None
    assert row.flops is not None
    return row.flops(call.args, call.target(*call.args, **call.kwargs))


@settings(max_examples=600)
@given(st.one_of(products(), convolutions(), attentions(), contractions()))
def test_operations_equal_the_flop_counter(call: Call) -> None:
    assert stated(call) == counted(call)


@settings(max_examples=30)
@given(sizes, sizes, sizes, sizes)
def test_operations_that_torch_does_not_count(b: int, n: int, k: int, m: int) -> None:
    def flops(target: torch._ops.OpOverload, *args: Any) -> Any:
        return stated(Call(target, args, {}))

    assert flops(aten.mv.default, t(n, k), t(k)) == 2 * n * k
    assert flops(aten.addmv.default, t(n), t(n, k), t(k)) == 2 * n * k
    assert flops(aten.addbmm.default, t(n, m), t(b, n, k), t(b, k, m)) == 2 * b * n * k * m
    assert flops(aten.inner.default, t(), t(n, m)) == 2 * n * m
    assert flops(aten.bilinear.default, t(b, n), t(b, k), t(m, n, k), None) == 2 * b * m * n * (
        k + 1
    )
    assert flops(aten.einsum.default, "i,j->ij", [t(n), t(m)]) == n * m
    assert flops(aten.einsum.default, "bi,ij,bj->b", [t(b, n), t(n, k), t(b, k)]) == 2 * b * k * (
        n + 1
    )
    ends = torch.tensor([n, n + b], dtype=torch.int32)
    assert (
        flops(aten._grouped_mm.default, t(n + b, 16), t(2, 16, 32), ends) == 2 * (n + b) * 16 * 32
    )
    # torch chooses the order with the fewest operations; left to right is an upper bound.
    chain = [t(b, n), t(n, k), t(k, m)]
    assert flops(aten.linalg_multi_dot.default, chain) == 2 * b * n * k + 2 * b * k * m


def test_no_operations_without_values() -> None:
    assert stated(Call(aten.linear.default, (t(0, 4), t(3, 4)), {})) == 0
    assert stated(Call(aten.linalg_multi_dot.default, ([t(3, 0), t(0, 2)],), {})) == 0


def symbolic(call: Call) -> tuple[Call, ShapeEnv]:
    """Return the call with every size of at least 2 symbolic."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def convert(v: Any) -> Any:
        return mode.from_tensor(v) if isinstance(v, torch.Tensor) else v

    args, kwargs = tree_map(convert, (call.args, call.kwargs))
    return Call(call.target, args, kwargs), environment


@settings(max_examples=chosen([5], [15])[0])
@given(st.one_of(products(), convolutions(), attentions(), contractions()))
def test_operations_of_symbolic_shapes(call: Call) -> None:
    """The count is an expression of the sizes with the right value, and counting adds no guard."""
    row = row_for(call.target)
    assert row is not None
    assert row.flops is not None
    made, environment = symbolic(call)
    output = made.target(*made.args, **made.kwargs)
    guards = list(environment.guards)
    flops = row.flops(made.args, output)
    assert environment.guards == guards
    assert int(flops) == stated(call)
