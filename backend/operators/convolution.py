"""`qsync::convolution`: output, input gradient and weight gradient of 1-D to 3-D convolutions.

The operator is composite like `qsync::linear`. Convolutions without a kernel of ours run in the
carrier; for an output wider than the carrier a CPU sums integers (`qsync::integer_convolution`).
Invariant: every convolution reads values of its format, and neither `x` nor `weight` is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qsync_fx.backend.cuda.problem import ConvOperation
from qsync_fx.backend.cuda.problem.problem import ConvProduct
from qsync_fx.backend.operators.conv_gradients import (
    Geometry,
    convolution_backward,
    forward,
    needs_padding,
)
from qsync_fx.backend.operators.convert import in_order
from qsync_fx.backend.operators.gemm import cpu_kernels, int_mm
from qsync_fx.backend.operators.gemm.dispatch import Dispatcher, partner
from qsync_fx.backend.operators.layer_kernels import computed, without_narrow_unit
from qsync_fx.backend.operators.once_differentiable import first_only
from qsync_fx.backend.operators.product_utils import (
    GradientRounding,
    ProductArguments,
    Scaled,
    backward_operand,
    carried,
    carrier,
    combined,
    define_product,
    incoming,
    scaled,
    split_scale,
    uniform,
    without_gradients,
)
from qsync_fx.devices.cpu_features import native_integer_products
from qsync_fx.devices.format_support import is_gpu
from qsync_fx.formats import Precision, precision
from qsync_fx.graph import Context
from qsync_fx.graph.fx_utils import arguments, memory_order
from qsync_fx.ops import row_for
from qsync_fx.passes.lowering_registry import Lowering, Operands, Role, dimensions, extent


def convolution(
    value: ProductArguments,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    order: Sequence[int],
) -> Tensor:
    """Compute `aten::convolution` from operands in a format, and the gradients likewise.

    Output: values are multiplied exactly in the format's carrier, and summed in FP32; INT8 sums are
    exact below 2**24. The sum is rounded to the carrier, or to `out_dtype` if that is wider: the
    convolution then runs in FP32, or exactly in INT32 on a CPU with an integer unit, if it is
    neither grouped nor transposed. Scale and bias are applied in FP32, then one rounding to
    `out_dtype` follows.

    Gradients: the incoming gradient is rounded to the format's `gradient` and convolved with the
    saved operands in the carrier. If that format is plain, as for `int8`, the weight is multiplied
    by its scale first and rounded to the carrier, and so is an input with a scale per sample; other
    scales are applied to the result. Otherwise, as for FP8 and `int8_grad`, per-channel scales are
    multiplied into the gradient, which is rounded once per product.

    A product of an ungrouped 2-D convolution (on CUDA also 1-D) by a kernel
    (`qsync::conv2d_product`) is not rounded to the carrier, and its INT8 sums are exact.

    Args:
        value: `x` is `[N, C, *size]` or `[C, *size]`; `weight` `[O, C / groups, *kernel]`,
            transposed `[C, O / groups, *kernel]`; `bias` `[O]`; `x_scale` `[]` or `[N, 1, ...]`;
            `w_scale` `[]` or per output channel `[O, 1, ...]`, transposed `[1, O, ...]` with groups
            = 1.
        stride, padding, dilation, transposed, output_padding, groups: of `aten::convolution`.
        order: dimensions of the result, and of the gradients, from the outermost in memory to the
            innermost.

    Returns:
        `[N, O, *size]` or `[O, *size]`. Gradients have the dtypes of `x`, `weight` and `bias`.
    """
    geometry = stride, padding, _spread(dilation, value.weight), transposed, output_padding, groups
    result, _ = _Convolution.apply(*value, geometry, order)  # type: ignore[no-untyped-call]
    return in_order(result, order)


def _spread(dilation: Sequence[int], weight: Tensor) -> list[int]:
    """Return the dilation, 1 along dimensions with one tap: torch 2.13 crashes for some in BF16."""
    size = weight.shape[2:]
    every = [*dilation] * (len(size) // len(dilation))
    return [1 if taps == 1 else step for step, taps in zip(every, size, strict=True)]


def _batched(t: Tensor, ndim: int) -> Tensor:
    return t if t.dim() == ndim else t.unsqueeze(0)


def _per_channel(scale: Tensor | None, ndim: int) -> Tensor | None:
    """Return a weight's scale in the shape that broadcasts against the output: `[1, O, 1, ...]`."""
    if scale is None or scale.dim() == 0:
        return scale
    return scale.reshape(1, -1, *[1] * (ndim - 2))


def _by_kernel(
    operation: ConvOperation,
    a: Scaled,
    b: Scaled,
    like: Tensor,
    geometry: Geometry,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Return a product of a batch by a kernel, or None; `like` is the input (dgrad) or weight."""
    stride, padding, dilation, transposed, _, groups = geometry
    if transposed or groups != 1:
        return None
    window = like.shape[2:], stride, padding, dilation
    x = ConvProduct(a[0], b[0], a[1], b[1], bias, *window, operation, dtype)
    b_dtype = None if operation == "fprop" else partner(a[0])
    return dispatcher.convolution_product(x, row, b_dtype)


def output(
    xq: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    row: Precision,
    out_dtype: torch.dtype,
    dispatcher: Dispatcher,
) -> Tensor:
    """Return the convolution of a batch, with scales and bias; plain formats use torch's own layer.

    `row` is the layer's format, `w_scale` is `[]` or `[1, O, 1, ...]`.
    """
    if row.plain:
        if bias is not None:
            bias = bias.to(row.dtype)
        return forward(xq, wq, bias, geometry).to(out_dtype)
    operands = (xq, x_scale), (wq, w_scale)
    result = _by_kernel("fprop", *operands, wq, geometry, row, out_dtype, dispatcher, bias)
    if result is not None:
        return result
    narrow, product = carrier(row, xq.device), None
    if out_dtype.itemsize > narrow.itemsize:
        product = int_mm.sums(xq, wq, geometry, row)
    if product is None:
        # The product is rounded to its compute dtype, so an FP32 output requires FP32.
        dtype = torch.promote_types(narrow, out_dtype)
        x, x_scale = carried(xq, x_scale, dtype)
        w, w_scale = carried(wq, w_scale, dtype)
        product = forward(x, w, None, geometry)
    if bias is not None:
        bias = bias.reshape(-1, *[1] * (wq.dim() - 2))
    return scaled(product, combined(x_scale, w_scale), bias, out_dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *shared, geometry, order = arguments
        inputs = ProductArguments(*shared)
        xq, wq, ndim = inputs.xq, inputs.wq, inputs.wq.dim()
        # Each gradient needs only the shape of its own operand, but one call computes both.
        linked = inputs.save(ctx, both=True)
        ctx.geometry = geometry
        ctx.order = order if len(order) == ndim else [0, *(dim + 1 for dim in order)]
        y = output(
            _batched(xq, ndim),
            inputs.x_scale,
            wq,
            _per_channel(inputs.w_scale, ndim),
            inputs.bias,
            geometry=geometry,
            row=precision(inputs.fmt),
            out_dtype=inputs.out_dtype,
            dispatcher=inputs.dispatcher,
        )
        if xq.dim() < ndim:
            # A view that an autograd.Function returns could not be modified in place.
            y = torch.ops.aten._unsafe_view.default(y, y.shape[1:])
        return y, linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, _ = ctx.saved_tensors
        rule = GradientRounding(ctx, seed)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        geometry, dispatcher = ctx.geometry, ctx.dispatcher
        row, ndim = precision(rule.fmt), wq.dim()
        g = _batched(gradient, ndim)
        dtype = rule.summed(carrier(row, xq.device))
        # A scale applied to the weight saves a pass over the input gradient.
        wq, w_scale = backward_operand(wq, w_scale, row, True, rule.mode)
        batch, x_scale = backward_operand(_batched(xq, ndim), x_scale, row, False, rule.mode)
        # Input and weight gradient contract the dimensions along which scales vary: channels and
        # batch.
        by_channel = _per_channel(w_scale, ndim)
        w_scale, w_fold = split_scale(w_scale, uniform(w_scale), by_channel)
        x_scale, x_fold = split_scale(x_scale, uniform(x_scale), x_scale)
        rounded = rule.incoming(g, w_fold, x_fold, ())
        dtypes = {role: rule.summed(rule.dtypes[role]) for role in Role}

        results: dict[Role, Tensor] = {}
        operands: dict[Role, tuple[ConvOperation, Scaled, Tensor]] = {
            Role.ACTIVATION: ("dgrad", (wq, w_scale), batch),
            Role.WEIGHT: ("wgrad", (batch, x_scale), wq),
        }
        for role in rounded:
            operation, other, like = operands[role]
            product = _by_kernel(
                operation, rounded[role], other, like, geometry, row, dtypes[role], dispatcher
            )
            if product is not None:
                results[role] = product
        missing = [role for role in rounded if role not in results]
        # A separate sum would extend the life of the gradient to the end of the step, where all
        # layers sum.
        with_bias = (
            need_bias
            and Role.WEIGHT in missing
            and incoming(row, g.device).plain
            and rounded[Role.WEIGHT][1] is None
        )

        def by_torch(roles: Sequence[Role]) -> Tensor | None:
            """Add the results of roles that read one gradient; return the gradient of the bias."""
            rounded_g, left = carried(*rounded[roles[0]], dtype, again=True)
            x, x_factor = carried(batch, x_scale, dtype, again=True)
            w, w_factor = carried(wq, w_scale, dtype, again=True)
            needed = [role in roles for role in Role]
            needed.append(with_bias and Role.WEIGHT in roles)
            channels = [g.shape[1]]
            *products, of_bias = convolution_backward(rounded_g, x, w, channels, geometry, needed)
            for role, product, factor in zip(Role, products, (w_factor, x_factor), strict=True):
                if product is not None and role in roles:
                    results[role] = scaled(product, combined(left, factor), None, dtypes[role])
            return of_bias

        grad_x = grad_weight = grad_bias = None
        if len(missing) == 2 and rounded[Role.ACTIVATION] is rounded[Role.WEIGHT]:
            grad_bias = by_torch(missing)
        else:
            for role in missing:
                grad_bias = by_torch([role])
        if need_x:
            result = rule.result(results[Role.ACTIVATION], Role.ACTIVATION)
            grad_x = in_order(result, ctx.order).view(xq.shape)
        if need_weight:
            result = rule.result(results[Role.WEIGHT], Role.WEIGHT)
            grad_weight = in_order(result, ctx.order)
        if need_bias:
            if grad_bias is None or not with_bias:
                grad_bias = g.sum([0, *range(2, ndim)], dtype=torch.float32)
            grad_bias = rule.bias(grad_bias)
        return without_gradients((grad_x, grad_weight, grad_bias), owned=2)


define_product(
    "convolution",
    convolution,
    owned="SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups, int[] order",
)


def _each(value: Any, spatial: int) -> list[Any]:
    """Return one number per spatial dimension; the schema lets a single one serve for all."""
    if not isinstance(value, (list, tuple)):
        return [value] * spatial
    return [*value] * (spatial // len(value))


def _geometry(node: fx.Node) -> Geometry | None:
    """Return the arguments of `aten::convolution`; None if the padding is asymmetric."""
    call = arguments(node)
    spatial = dimensions(call["weight"]) - 2
    dilation = _each(call["dilation"], spatial)
    padding = call["padding"]
    if padding == "same":
        # torch pads the output to the size of the input, with an odd remainder at the end.
        kernel = call["weight"].meta["val"].shape[2:]
        total = [step * (int(size) - 1) for step, size in zip(dilation, kernel, strict=True)]
        if any(size % 2 for size in total):
            return None
        padding = [size // 2 for size in total]
    elif padding == "valid":
        padding = 0
    return (
        _each(call["stride"], spatial),
        _each(padding, spatial),
        dilation,
        _transposed(node),
        _each(call.get("output_padding", 0), spatial),
        call["groups"],
    )


def _refuses(node: fx.Node) -> str | None:
    if _geometry(node) is None:
        return "its padding differs between the two sides, which needs a padded input"
    return None


def _slower(node: fx.Node, fmt: Precision, context: Context) -> str | None:
    if is_gpu(context.device):
        row = row_for(node.target)
        assert row is not None, node.format_node()
        keep = _keep if context.options.scaling == "channel" else _none
        return without_narrow_unit(node, row, fmt, context, _emit, keep)
    call, geometry = arguments(node), _geometry(node)
    x, weight = call["input"].meta["val"], call["weight"].meta["val"]
    if geometry is None or x.dim() != weight.dim():
        return None
    stride, *_, transposed, _, groups = geometry
    if fmt.plain:
        # As a matrix product: windows of all output positions, with the weight.
        out = x if transposed else node.meta["val"]
        positions = (*out.shape[:1], *out.shape[2:])
        rows, channels, summed = map(extent, (positions, weight.shape[:1], weight.shape[1:]))
        if rows is None or channels is None or summed is None:
            return None
        return cpu_kernels.gemm_too_small(rows, channels, summed, fmt)
    if not native_integer_products():
        return "the native module has no INT8 kernel for this CPU, so its convolutions run in bf16"
    if transposed or groups != 1 or weight.dim() != 4:
        return "the CPU kernel supports only 2-d convolutions, neither transposed nor grouped"
    return cpu_kernels.conv_too_small(weight.shape, stride)


def _emit(node: fx.Node, argument: Operands) -> fx.Node:
    geometry = _geometry(node)
    assert geometry is not None, "refused"
    (x, xq, x_scale), (w, wq, w_scale) = argument.operands
    tensors = x, w, arguments(node)["bias"], xq, x_scale, wq, w_scale, argument.seed
    value = node.meta["val"]
    order = memory_order(value) or list(range(value.dim()))
    rest = argument.stream, *geometry, order, argument.fmt, argument.rounding, argument.out_dtype
    return node.graph.call_function(torch.ops.qsync.convolution.default, (*tensors, *rest))


def _transposed(node: fx.Node) -> bool:
    # An argument of the generic operators, part of the name of the others.
    return bool(arguments(node).get("transposed", "transpose" in str(node.target)))


def _keep(node: fx.Node, role: Role) -> list[int]:
    """Return the dimension with a scale per sample or per output channel, if there is one."""
    call = arguments(node)
    if role == Role.ACTIVATION:
        return [0] * (dimensions(call["input"]) == dimensions(call["weight"]))
    if not _transposed(node):
        return [0]
    # Grouped transposed convolutions have no dimension of their own for output channels.
    return [1] * (call["groups"] == 1)


def _none(node: fx.Node, role: Role) -> list[int]:
    return []


def _with_right_gradients(node: fx.Node) -> list[fx.Node]:
    geometry, result = _geometry(node), arguments(node)
    if geometry is None:
        return []
    weight, x = result["weight"], result["input"]
    sizes: Any = fx.node.map_arg(geometry, lambda size: size.meta["val"])
    if needs_padding(weight.meta["val"], x.meta["val"], sizes):
        node.target = torch.ops.qsync.padded_convolution.default
        node.args, node.kwargs = (x, weight, result["bias"], *geometry), {}
    return []


_NAMES = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
LOWERINGS = tuple(
    Lowering(name, _emit, _keep, _refuses, computed, _with_right_gradients, slower=_slower)
    for name in (*_NAMES.split(), "convolution", "_convolution")
)
