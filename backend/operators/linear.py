"""`qsync::linear`: the three products of a linear layer, output, input gradient and weight gradient.

Why composite: the products are torch's own where no kernel of ours is faster, and AOTAutograd and Inductor see them, so that
conversions, scales and bias are fused with what surrounds the layer. The real tensors are there for autograd alone: arithmetic uses the
quantized ones, which are also what is saved for the backward pass, at one byte a value (QSync, section IV-B: operator = forward and
backward together).

Invariant: no product sees anything but values of its format, and neither `x` nor `weight` is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qsync_fx.backend.cuda.collect import computed
from qsync_fx.backend.operators import by_kernel, integers
from qsync_fx.backend.operators.carry import carry
from qsync_fx.backend.operators.derivatives import first_only, link, place
from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.products import SHARED_STREAM, carrier, combined, round_gradients, scaled, uniform
from qsync_fx.backend.operators.quantize_transposed import quantize_transposed
from qsync_fx.nodes import arguments
from qsync_fx.passes.lowering import Lowering, Operands, Role, dimensions
from qsync_fx.precision import Precision, precision


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    xq: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    seed: Tensor,
    stream: int,
    fmt: str,
    rounding: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes `x @ weight.T + bias` from operands in a format, and the gradients likewise.

    Output: INT8 products are summed exactly in INT32 (in FP32 from 133,000 products an output on); formats with a carrier are
    multiplied in it, summed in FP32, and rounded to the carrier. Then FP32: scale, bias, one rounding to `out_dtype`.

    Gradients: the incoming one is rounded to the format's `gradient` (BF16 for INT8, scaled E5M2 for FP8, TF32 for TF32), multiplied
    with the saved operand in the carrier, rounded to the carrier, and scaled in FP32. Where the saved operand has a scale per channel,
    that lies along the contracted dimension: it is multiplied into the incoming gradient in FP32 before the gradient is rounded, and
    each of the two products has a rounding of its own. The bias gradient is the FP32 sum of the unrounded incoming gradient.
    A gradient rounded to INT8 (`int8_grad`) is multiplied as the output is: INT8 by INT8, summed exactly, scaled in FP32 (from 133,000
    rows or channels on in the carrier, on the CPU in FP32, as INT32 might not hold every sum).

    On CUDA each of the three products may be a kernel (`qsync::gemm`), which leaves the rounding to the carrier out. Tensor cores read
    INT8 contiguous along the sum: of the gradient's rounding two layouts come out, of the saved operand a copy is made.

    Args:
        x: `[..., K]`, floating point; for autograd only.
        weight: `[N, K]`, floating point; for autograd only.
        bias: `[N]`, floating point, or None.
        xq: `x` in the format, same shape.
        x_scale: FP32, `[]` or `[..., 1]`; None for unscaled formats.
        wq: `weight` in the format, same shape.
        w_scale: FP32, `[]` or `[N, 1]`; None for unscaled formats.
        seed: int64, `[1]` or `[]`, of the graph.
        stream: tells operators of one graph apart; at least 0 and below 2**30.
        fmt: name of the format.
        rounding: how gradients are rounded to formats that are not plain.
        out_dtype: the output's type.

    Returns:
        `[..., N]`. Gradients have the types of `x`, `weight` and `bias`: with master weights in FP32, FP32.
    """
    found, _ = _Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, xq, x_scale, wq, w_scale, seed, stream, fmt, rounding, out_dtype
    )
    result: Tensor = found
    return result


def _rows(t: Tensor) -> Tensor:
    """Returns `[..., K]` as `[M, K]`."""
    return t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def _per_row(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else scale.reshape(-1, 1)


def _per_column(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else scale.reshape(1, -1)


def output(
    rows: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    row: Precision,
    out_dtype: torch.dtype,
) -> Tensor:
    """Returns `rows @ wq.T`, `[M, N]`, with scales (`[]`, `[M, 1]`; `[]`, `[1, N]`) and bias; `row` is the format of the layer."""
    whole = True
    if not by_kernel.silent(rows.device):
        operands = rows, wq.t(), x_scale, w_scale, bias, out_dtype, row
        found = by_kernel.product(*operands)
        if found is not None:
            return found
        whole = by_kernel.integers_pay(*operands)
    product = integers.product(rows, wq, (row, row)) if whole else None
    if product is None:
        # The product is rounded to the type that it is computed in, so an FP32 output asks for FP32.
        dtype = torch.promote_types(_narrow(row, row, rows.device), out_dtype)
        product = carry(rows, dtype) @ carry(wq, dtype).t()
    return scaled(product, combined(x_scale, w_scale), bias, out_dtype)


def _narrow(row: Precision, other: Precision, device: torch.device) -> torch.dtype:
    """Returns the type that a product is computed in, and rounded to, where no integer unit takes it.

    On the CPU it is FP32 for integers: the carrier would round where another shape has exact sums.
    """
    exact = row.kind == other.kind == "integer" and device.type == "cpu"
    return torch.float32 if exact else carrier(row)


def input_gradient(
    g: Tensor, scale: Tensor | None, wq: Tensor, w_scale: Tensor | None, row: Precision, dtype: torch.dtype
) -> Tensor:
    """Returns `g @ wq`, `[M, K]`, of the rounded gradient `[M, N]`; scales are single numbers."""
    found = by_kernel.product(g, wq, scale, w_scale, None, dtype, row, by_kernel.partner(g))
    if found is None:
        found = _by_integers(g, wq, scale, w_scale, row, dtype)
    if found is not None:
        return found
    narrow = _narrow(row, precision(row.gradient), g.device)
    return scaled(g.to(narrow) @ wq.to(narrow), combined(scale, w_scale), None, dtype)


def weight_gradient(
    g: Tensor,
    scale: Tensor | None,
    xq: Tensor,
    x_scale: Tensor | None,
    row: Precision,
    dtype: torch.dtype,
    turned: Tensor | None = None,
) -> Tensor:
    """Returns `g.T @ xq`, `[N, K]`, of the rounded gradient `[M, N]` and the saved activation `[M, K]`; scales are single numbers.

    `turned` is `g.T` with its rows in memory, if there is such a copy.
    """
    if precision(row.gradient).kind == "integer" or not by_kernel.silent(g.device):
        by_rows = g.t() if turned is None else turned
        found = by_kernel.product(by_rows, xq, scale, x_scale, None, dtype, row, by_kernel.partner(g))
        if found is None:
            found = _by_integers(by_rows, xq, scale, x_scale, row, dtype)
        if found is not None:
            return found
    narrow = _narrow(row, precision(row.gradient), g.device)
    return scaled(g.to(narrow).t() @ xq.to(narrow), combined(scale, x_scale), None, dtype)


def _by_integers(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, row: Precision, dtype: torch.dtype
) -> Tensor | None:
    """Returns `a @ b` of a rounded gradient and a saved operand by torch's integer unit; None where it is not to compute it."""
    rounded = precision(row.gradient)
    if rounded.kind != "integer" or not by_kernel.integers_pay(a, b, a_scale, b_scale, None, dtype, row):
        return None
    product = integers.product(a, b.t(), (rounded, row))
    return None if product is None else scaled(product, combined(a_scale, b_scale), None, dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        xq: Tensor,
        x_scale: Tensor | None,
        wq: Tensor,
        w_scale: Tensor | None,
        seed: Tensor,
        stream: int,
        fmt: str,
        rounding: str,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        need_x, need_weight = ctx.needs_input_grad[:2]
        # With a frozen weight nothing needs the activation again, and the other way round.
        linked = link()
        ctx.save_for_backward(xq if need_weight else None, x_scale, wq if need_x else None, w_scale, seed, linked)
        ctx.shape = xq.shape
        ctx.how = stream, rounding
        ctx.fmt, ctx.place = fmt, place(stream)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        y = output(_rows(xq), _per_row(x_scale), wq, _per_column(w_scale), bias, precision(fmt), out_dtype)
        # A view that a function like this one returns could not be written to in place.
        result: Tensor = torch.ops.aten._unsafe_view.default(y, [*xq.shape[:-1], wq.shape[0]])
        return result, linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, _ = ctx.saved_tensors
        fmt, (stream, rounding) = ctx.fmt, ctx.how
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        row, rows = precision(fmt), _rows(gradient)
        # The input gradient contracts the output channels, the weight gradient the rows: the very dimensions that scales vary along.
        folds: dict[Role, Tensor | None] = {}
        if need_x:
            folds["activation"] = None if uniform(w_scale) else _per_column(w_scale)
        if need_weight:
            folds["weight"] = None if uniform(x_scale) else _per_row(x_scale)
        grad_x = grad_weight = grad_bias = None
        rounded: dict[Role, tuple[Tensor, Tensor | None]]
        turned, factor = None, x_scale if uniform(x_scale) else None
        folded = any(fold is not None for fold in folds.values())
        if need_weight and not folded and by_kernel.wants_turned(rows, _rows(xq), factor, weight_dtype, row):
            g, turned, scale = quantize_transposed(rows, seed, stream + SHARED_STREAM, row.gradient, rounding)
            pair: tuple[Tensor, Tensor | None] = g, scale
            rounded = dict.fromkeys(folds, pair)
        else:
            rounded = round_gradients(rows, folds, seed, stream, fmt, rounding)
        if need_x:
            w_factor = w_scale if uniform(w_scale) else None
            grad_x = input_gradient(*rounded["activation"], wq, w_factor, row, x_dtype).view(ctx.shape)
        if need_weight:
            grad_weight = weight_gradient(*rounded["weight"], _rows(xq), factor, row, weight_dtype, turned)
        if need_bias:
            grad_bias = rows.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, *[None] * 9


define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, Tensor seed, int stream, "
    "str fmt, str rounding, ScalarType out_dtype) -> Tensor",
    {"CompositeImplicitAutograd": linear},
)


def _call(node: fx.Node, bias: Any, weight: tuple[Any, Any, Any], given: Operands) -> fx.Node:
    x, xq, x_scale = given.operands[0]
    w, wq, w_scale = weight
    tensors = x, w, bias, xq, x_scale, wq, w_scale, given.seed
    how = given.stream, given.fmt, given.rounding, given.out_dtype
    return node.graph.call_function(torch.ops.qsync.linear.default, (*tensors, *how))


def _emit_linear(node: fx.Node, given: Operands) -> fx.Node | str:
    if dimensions(given.operands[1][0]) != 2:
        return "its weight is a vector, so its output has no channels"
    return _call(node, arguments(node)["bias"], given.operands[1], given)


def _emit_addmm(node: fx.Node, given: Operands) -> fx.Node | str:
    """`addmm(bias, x, weight)` has its weight as `[K, N]`."""
    found, weight = arguments(node), given.operands[1]
    if found["beta"] != 1 or found["alpha"] != 1:
        return "it weighs its bias or its product, which a linear layer does not"
    if tuple(found["self"].meta["val"].shape) != tuple(weight[0].meta["val"].shape[1:]):
        return "it adds something else than a bias per output channel to its product"
    w, wq, w_scale = (part and _transposed(part) for part in weight)
    return _call(node, found["self"], (w, wq, w_scale), given)


def _transposed(node: fx.Node) -> fx.Node:
    new = node.graph.call_function(torch.ops.aten.t.default, (node,))
    new.meta["val"] = node.meta["val"].t()
    return new


def _keep_linear(node: fx.Node, role: Role) -> list[int]:
    return [0] if role == "weight" else list(range(dimensions(arguments(node)["input"]) - 1))


def _keep_addmm(node: fx.Node, role: Role) -> list[int]:
    return [1] if role == "weight" else [0]


LOWERINGS = (
    Lowering("linear", _emit_linear, _keep_linear, computed),
    Lowering("addmm", _emit_addmm, _keep_addmm, computed),
)
