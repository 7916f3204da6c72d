"""`qsync::linear`, `qsync::contract` and `qsync::grouped`: matrix products with a weight.

The operators are composite: unless one of our kernels is faster, the products are torch's, and
Inductor fuses casts, scales and bias around them. `x` and `weight` are inputs for autograd alone.
Invariant: every product multiplies values of its format, and neither `x` nor `weight` is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qsync_fx import rounding as stream_layout
from qsync_fx.backend.operators.convert import in_order
from qsync_fx.backend.operators.gemm import cpu_kernels, int_mm
from qsync_fx.backend.operators.gemm.dispatch import Dispatcher, MatrixProduct, partner
from qsync_fx.backend.operators.gemm.int_mm import grouped_products
from qsync_fx.backend.operators.layer_kernels import computed, without_narrow_unit
from qsync_fx.backend.operators.once_differentiable import first_only
from qsync_fx.backend.operators.product_utils import (
    GradientRounding,
    ProductArguments,
    Scaled,
    carried,
    combined,
    define_product,
    incoming,
    multiplied_in,
    scaled,
    split_scale,
    transposed,
    uniform,
    without_gradients,
)
from qsync_fx.backend.operators.quantize import quantize_transposed
from qsync_fx.devices.format_support import is_gpu
from qsync_fx.formats import Precision, precision
from qsync_fx.graph import Context, node_metadata
from qsync_fx.graph.fx_utils import arguments, memory_order
from qsync_fx.ops import OperatorRow, row_for
from qsync_fx.ops.matmul import STRETCHED, Contraction
from qsync_fx.passes.lowering_registry import Lowering, Operands, Role, extent


def linear(value: ProductArguments) -> Tensor:
    """Compute `x @ weight.T + bias` from operands in a format, and the gradients likewise.

    Output: INT8 products are summed exactly in INT32 (in FP32 from K = 133,000 on); other formats
    are multiplied in the carrier, summed in FP32 and rounded to it. Scale and bias are applied in
    FP32, then one rounding to `out_dtype` follows.

    Gradients: the incoming gradient is rounded to the format's `gradient` (BF16 for INT8, scaled
    E5M2 for FP8, TF32 for TF32). It is multiplied by the saved operand in the carrier; the result
    is rounded to the carrier and scaled in FP32. A per-channel scale of the saved operand varies
    along the contracted dimension: it is multiplied into the incoming gradient before rounding, so
    that each of the two products has its own rounding. The bias gradient is the FP32 sum of the
    unrounded gradient. INT8 gradients (`int8_grad`) are multiplied like the output. With
    `gradients` "stochastic" the backward products are computed in FP32, and 16-bit gradients and
    results are rounded stochastically.

    A product by a kernel (`qsync::gemm`; INT8 on the CPU, on CUDA if faster) is not rounded to the
    carrier.

    Args:
        value: `x` is `[..., K]`, or `[E, M, K]` for a batch of layers such as experts, each with
            its own operands and scales; `weight` `[N, K]` or `[E, N, K]`; `bias` `[N]` or `[E, 1,
            N]`; `x_scale` `[]` or `[..., 1]`, batched `[E, 1, 1]` or `[E, M, 1]`; `w_scale` `[]` or
            `[N, 1]`, batched `[E, 1, 1]` or `[E, N, 1]`.

    Returns:
        `[..., N]` or `[E, M, N]`. Gradients have the dtypes of `x`, `weight` and `bias`.
    """
    result, _ = _Linear.apply(*value)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def _rows(t: Tensor, stacked: bool) -> Tensor:
    """Return `[..., K]` as `[M, K]`; batched layers have three dimensions already."""
    if stacked:
        return t
    if t.dim() == 1:
        return t.unsqueeze(0)
    return t.flatten(0, -2)


def _per_row(scale: Tensor | None, stacked: bool) -> Tensor | None:
    if scale is None or scale.dim() == 0 or stacked:
        return scale
    return scale.reshape(-1, 1)


def _per_column(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else transposed(scale)


def _uniform(scale: Tensor | None, stacked: bool) -> bool:
    """Return whether each layer has a single scale."""
    if scale is None or not stacked:
        return uniform(scale)
    # Shared scales have size 1, an int; a test of a symbolic size would add a guard.
    rows = scale.shape[1]
    return type(rows) is int and rows == 1


def output(
    rows: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    row: Precision,
    out_dtype: torch.dtype,
    dispatcher: Dispatcher,
) -> Tensor:
    """Return `rows @ wq.T`, `[M, N]`, with scales and bias; plain formats use torch's own layer.

    `rows` is `[M, K]`, `wq` `[N, K]`; the FP32 scales are `[]` or `[M, 1]`, and `[]` or `[1, N]`.
    Operands with a third, leading dimension are batched, here and in the gradients.
    """
    if row.plain:
        if bias is not None:
            bias = bias.to(row.dtype)
        if wq.dim() == 2:
            plain: Tensor = torch.ops.aten.linear.default(rows, wq, bias)
            return plain.to(out_dtype)
        if bias is None:
            return (rows @ transposed(wq)).to(out_dtype)
        return torch.baddbmm(bias, rows, transposed(wq)).to(out_dtype)
    call = MatrixProduct(rows, wq, x_scale, w_scale, out_dtype, row, bias, transposed=True)
    result = dispatcher.matrix_product(call)
    if result is not None:
        return result
    product = None
    if dispatcher.integers_pay(call):
        product = int_mm.product(rows, wq, (row, row))
    if product is None:
        # The product is rounded to its compute dtype, so an FP32 output requires FP32.
        dtype = torch.promote_types(multiplied_in(row, row, rows.device), out_dtype)
        left, x_scale = carried(rows, x_scale, dtype)
        right, w_scale = carried(wq, w_scale, dtype)
        product = left @ transposed(right)
    return scaled(product, combined(x_scale, w_scale), bias, out_dtype)


def input_gradient(
    g: Tensor,
    scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `g @ wq`, `[M, K]`, of the rounded gradient, `[M, N]`; scales are single numbers.

    `compute_dtype` is the dtype of a product by torch, by default the format's.
    """
    call = MatrixProduct(g, wq, scale, w_scale, dtype, row, b_dtype=partner(g))
    result = _without_casts(call, dispatcher)
    if result is not None:
        return result
    narrow = compute_dtype or _backward_dtype(row, g.device)
    w, w_scale = carried(wq, w_scale, narrow, again=True)
    g, scale = carried(g, scale, narrow, again=True)
    return scaled(g @ w, combined(scale, w_scale), None, dtype)


def weight_gradient(
    g: Tensor,
    scale: Tensor | None,
    xq: Tensor,
    x_scale: Tensor | None,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    compute_dtype: torch.dtype | None = None,
    g_transposed: Tensor | None = None,
    by_columns: bool = False,
) -> Tensor:
    """Return `g.T @ xq`, `[N, K]`, of the rounded gradient, `[M, N]`, and the activation, `[M, K]`.

    Scales are single numbers. `g_transposed` is a row-major copy of `g.T`, if there is one.
    `by_columns`: the weight is column-major, so its gradient is too.
    """
    if incoming(row, g.device).kind == "integer" or dispatcher.covers(g.device):
        if g_transposed is None:
            g_transposed = transposed(g)
        call = MatrixProduct(g_transposed, xq, scale, x_scale, dtype, row, b_dtype=partner(g))
        result = _without_casts(call, dispatcher)
        if result is not None:
            return result
    narrow = compute_dtype or _backward_dtype(row, g.device)
    x, x_scale = carried(xq, x_scale, narrow, again=True)
    g, scale = carried(g, scale, narrow, again=True)
    if by_columns:
        product = transposed(transposed(x) @ g)
    else:
        product = transposed(g) @ x
    return scaled(product, combined(scale, x_scale), None, dtype)


def _backward_dtype(row: Precision, device: torch.device) -> torch.dtype:
    return multiplied_in(row, incoming(row, device), device)


def _without_casts(call: MatrixProduct, dispatcher: Dispatcher) -> Tensor | None:
    """Return a gradient by a kernel or torch's integer unit; None if neither should compute it."""
    result = dispatcher.matrix_product(call)
    rounded = incoming(call.row, call.a.device)
    if result is not None or rounded.kind != "integer" or not dispatcher.integers_pay(call):
        return result
    product = int_mm.product(call.a, transposed(call.b), (rounded, call.row))
    if product is None:
        return None
    return scaled(product, combined(call.a_scale, call.b_scale), None, call.out_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = ProductArguments(*arguments)
        xq, wq = inputs.xq, inputs.wq
        linked = inputs.save(ctx)
        ctx.shape = xq.shape
        ctx.stacked = stacked = wq.dim() == 3
        # torch returns the gradient of a column-major matrix column-major.
        ctx.by_columns = not wq.is_contiguous() and transposed(wq).is_contiguous()
        ctx.x_by_columns = xq.dim() == 2 and not xq.is_contiguous() and xq.t().is_contiguous()
        y = output(
            _rows(xq, stacked),
            _per_row(inputs.x_scale, stacked),
            wq,
            _per_column(inputs.w_scale),
            inputs.bias,
            row=precision(inputs.fmt),
            out_dtype=inputs.out_dtype,
            dispatcher=inputs.dispatcher,
        )
        # A view that an autograd.Function returns could not be modified in place.
        result: Tensor = torch.ops.aten._unsafe_view.default(y, [*xq.shape[:-1], wq.shape[-2]])
        return result, linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, _ = ctx.saved_tensors
        rule = GradientRounding(ctx, seed)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        stacked, dispatcher = ctx.stacked, ctx.dispatcher
        row, rows = precision(rule.fmt), _rows(gradient, stacked)
        narrow = rule.summed(_backward_dtype(row, rows.device))
        # Input and weight gradient contract the dimensions along which scales vary: channels and
        # rows.
        by_row, by_column = _per_row(x_scale, stacked), _per_column(w_scale)
        w_scale, w_fold = split_scale(w_scale, _uniform(w_scale, stacked), by_column)
        x_scale, x_fold = split_scale(x_scale, _uniform(x_scale, stacked), by_row)
        grad_x = grad_weight = grad_bias = g_transposed = None
        if need_weight:
            xq = _rows(xq, stacked)
        to_dtype = rule.dtypes[Role.WEIGHT]
        unfolded = need_weight and x_fold is None and (w_fold is None or not need_x)
        if unfolded and dispatcher.reads_transpose(rows, xq, x_scale, to_dtype, row):
            shared, fmt = rule.stream + stream_layout.SHARED, row.gradient.name
            q, g_transposed, q_scale = quantize_transposed(rows, seed, shared, fmt, rule.rounding)
            rounded: dict[Role, Scaled] = dict.fromkeys(Role, (q, q_scale))
        else:
            rounded = rule.incoming(rows, w_fold, x_fold, [0] * stacked)
        if need_x:
            dtype = rule.summed(rule.dtypes[Role.ACTIVATION])
            g, scale = rounded[Role.ACTIVATION]
            to_x = input_gradient(g, scale, wq, w_scale, row, dtype, dispatcher, narrow)
            grad_x = rule.result(to_x, Role.ACTIVATION).view(ctx.shape)
            if ctx.x_by_columns:
                grad_x = in_order(grad_x, (1, 0))
        if need_weight:
            dtype = rule.summed(rule.dtypes[Role.WEIGHT])
            g, scale = rounded[Role.WEIGHT]
            settings = row, dtype, dispatcher, narrow, g_transposed, ctx.by_columns
            to_weight = weight_gradient(g, scale, xq, x_scale, *settings)
            grad_weight = rule.result(to_weight, Role.WEIGHT)
        if need_bias:
            grad_bias = rule.bias(rows.sum(-2, keepdim=stacked, dtype=torch.float32))
        return without_gradients((grad_x, grad_weight, grad_bias))


define_product("linear", linear)


def contract(value: ProductArguments, equation: str, order: Sequence[int]) -> Tensor:
    """Compute the product of `x` and `weight` in `equation`, and its gradients, by `linear`.

    Both factors are viewed with their dimensions in the order of a linear layer, without a copy if
    a kernel accepts the strides.

    Args:
        value: the shared arguments; scales are `[]` or have 1 in the dimensions along which they
            are constant.
        equation: one letter per dimension, "amk,kn->amn"; "1" for a broadcast dimension of size 1.
            A letter of both factors and the result is a batch dimension.
        order: dimensions of the result from the outermost in memory to the innermost.
    """
    factors, _, result = equation.partition("->")
    item, other = factors.split(",")
    c = Contraction((item, other), result, (0, 1))
    sizes = dict(zip(item + other, (*value.x.shape, *value.weight.shape), strict=True))
    a, b = (c.batch, c.unshared(0), c.summed), (c.batch, c.unshared(1), c.summed)
    as_a_layer = value._replace(
        x=_arranged(value.x, item, a),
        weight=_arranged(value.weight, other, b, columns=True),
        xq=_arranged(value.xq, item, a),
        x_scale=_arranged(value.x_scale, item, a),
        wq=_arranged(value.wq, other, b, columns=True),
        w_scale=_arranged(value.w_scale, other, b, columns=True),
    )
    made = c.batch + c.unshared(0) + c.unshared(1)
    y = linear(as_a_layer).reshape([sizes[letter] for letter in made])
    return in_order(y.permute([made.index(letter) for letter in result]), order)


def _arranged(t: Any, letters: str, parts: tuple[str, str, str], columns: bool = False) -> Any:
    """Return a tensor or scale as `[batch, rows, contracted]`; a single scale or None unchanged.

    Without a batch there is no first dimension, and the rows of an activation stay separate.
    """
    if t is None or t.dim() == 0:
        return t
    for index in reversed([index for index, letter in enumerate(letters) if letter == STRETCHED]):
        t = t.squeeze(index)
    letters = letters.replace(STRETCHED, "")
    batch, rows, summed = parts
    t = t.permute([letters.index(letter) for letter in batch + rows + summed])
    if len(summed) > 1:
        t = t.flatten(-len(summed))
    if batch or columns:
        t = t.flatten(len(batch), -2) if rows else t.unsqueeze(-2)
    if batch:
        t = t.flatten(0, len(batch) - 1)
    return t


define_product("contract", contract, owned="str equation, int[] order")


def grouped(value: ProductArguments, offs: Tensor) -> Tensor:
    """Compute `x[start:end] @ weight[e]` for each group `e`, and the gradients.

    Args:
        value: `x` is `[S, K]`, sorted by group; `weight` `[E, K, N]`; `x_scale` `[]` or `[S, 1]`;
            `w_scale` `[E, 1, 1]` or `[E, 1, N]`.
        offs: `[E]`, the end of each group in the rows.
    """
    result, _ = _Grouped.apply(*value, offs)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def _by_row(scale: Tensor | None, offs: Tensor, rows: Tensor) -> Tensor | None:
    """Return the scale of each row's weight, `[S, 1]` or `[S, N]`."""
    if scale is None:
        return None
    group = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), offs, right=True)
    # Rows beyond the last group have no product; any scale will do.
    return scale.flatten(1)[group.clamp(max=offs.shape[0] - 1)]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *shared, offs = arguments
        inputs = ProductArguments(*shared)
        xq, wq, fmt, out_dtype = inputs.xq, inputs.wq, inputs.fmt, inputs.out_dtype
        linked = inputs.save(ctx, offs)
        row = precision(fmt)
        dtype = torch.promote_types(multiplied_in(row, row, xq.device), out_dtype)
        y = grouped_products(xq, wq, offs, fmt, fmt, dtype)
        scale = combined(inputs.x_scale, _by_row(inputs.w_scale, offs, xq))
        return scaled(y, scale, None, out_dtype), linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, offs, _ = ctx.saved_tensors
        rule = GradientRounding(ctx, seed)
        fmt, row = ctx.fmt, precision(ctx.fmt)
        narrow = incoming(row, gradient.device)
        dtype = multiplied_in(row, narrow, gradient.device)
        per_group = w_scale is None or w_scale.flatten(1).shape[1] == 1
        by_row = _by_row(w_scale, offs, gradient)
        w_scale, w_fold = split_scale(by_row, per_group, by_row)
        x_scale, x_fold = split_scale(x_scale, uniform(x_scale), x_scale)
        rounded = rule.incoming(gradient, w_fold, x_fold, ())
        grad_x = grad_weight = None
        if Role.ACTIVATION in rounded:
            g, scale = rounded[Role.ACTIVATION]
            product = grouped_products(g, wq.mT, offs, narrow.name, fmt, dtype)
            grad_x = scaled(product, combined(scale, w_scale), None, rule.dtypes[Role.ACTIVATION])
        if Role.WEIGHT in rounded:
            g, scale = rounded[Role.WEIGHT]
            product = grouped_products(xq.t(), g, offs, fmt, narrow.name, dtype)
            grad_weight = scaled(product, combined(scale, x_scale), None, rule.dtypes[Role.WEIGHT])
        return without_gradients((grad_x, grad_weight), owned=1)


define_product("grouped", grouped, third="Tensor offs", gradients=False)


def _row(node: fx.Node) -> OperatorRow:
    note = node_metadata.NOTE.get(node)
    row = row_for(node.target) if note is None else note.row
    assert row is not None and row.contracts is not None, node.format_node()
    return row


def _contraction(node: fx.Node) -> Contraction | str:
    """Return the contraction of a product, activation first; or the reason why it is no layer's."""
    row = _row(node)
    assert row.contracts is not None
    result = row.contracts(
        fx.node.map_arg(list(arguments(node).values()), lambda used: used.meta["val"])
    )
    if isinstance(result, str):
        return result
    weight = result.places.index(row.scaled[1])
    if why := result.unfit(weight):
        return why
    return result if weight else result.swapped


def _refuses(node: fx.Node) -> str | None:
    result = _contraction(node)
    if not isinstance(result, str) and result.group and node.meta["val"].device.type != "cpu":
        return "only the CPU has a grouped product for it"
    return result if isinstance(result, str) else None


def _slower(node: fx.Node, fmt: Precision, context: Context) -> str | None:
    result = _contraction(node)
    if isinstance(result, str):
        return None
    if is_gpu(context.device):
        keep = _keep if context.options.scaling == "channel" else _separate
        return without_narrow_unit(node, _row(node), fmt, context, _emit, keep)
    rows, channels, summed = (
        extent(result.sizes[letter] for letter in letters)
        for letters in (result.unshared(0), result.unshared(1), result.summed)
    )
    if fmt.scaled and (why := cpu_kernels.without_unit(context.device)) is not None:
        return why
    if rows is None or channels is None or summed is None:
        return None
    return cpu_kernels.gemm_too_small(rows, channels, summed, fmt)


def _emit(node: fx.Node, argument: Operands) -> fx.Node:
    result = _contraction(node)
    assert not isinstance(result, str), "refused"
    (x, xq, x_scale), (w, wq, w_scale) = argument.operands
    call, operators = arguments(node), torch.ops.qsync
    extra: tuple[Any, ...] = ()
    third = None
    if result.group:
        operator, third = operators.grouped.default, call["offs"]
    else:
        operator = operators.linear.default
        if added := _row(node).added:
            third = list(call.values())[added[0]]
        if not result.is_linear:
            value: Tensor = node.meta["val"]
            # Sizes that depend on values have no strides yet; the result is then row-major.
            order = memory_order(value) or list(range(value.dim()))
            operator, extra = operators.contract.default, (result.equation, order)
    tensors = x, w, third, xq, x_scale, wq, w_scale, argument.seed
    settings = argument.fmt, argument.rounding, argument.out_dtype
    return node.graph.call_function(operator, (*tensors, argument.stream, *extra, *settings))


def _keep(node: fx.Node, role: Role) -> list[int]:
    result = _contraction(node)
    return [] if isinstance(result, str) else result.channels(int(role == Role.WEIGHT))


def _separate(node: fx.Node, role: Role) -> list[int]:
    result = _contraction(node)
    return [] if isinstance(result, str) else result.separate(int(role == Role.WEIGHT))


LOWERINGS = tuple(
    Lowering(name, _emit, _keep, _refuses, computed, separate=_separate, slower=_slower)
    for name in (
        *("linear", "addmm", "mm", "matmul", "linalg_matmul", "inner", "tensordot", "einsum"),
        *("mv", "addmv", "bmm", "baddbmm", "addbmm", "_grouped_mm", "grouped_mm"),
    )
)
