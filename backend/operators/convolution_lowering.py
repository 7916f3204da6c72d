"""Lowering of torch's convolutions to `qsync::convolution`, and padding of the remaining ones.

Invariant: every spelling of a convolution has one geometry: a number per spatial dimension, numeric
padding, transposed or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qsync_fx.backend.operators.conv_gradients import Geometry, needs_padding
from qsync_fx.backend.operators.gemm import cpu_kernels, gpu_profitability
from qsync_fx.backend.operators.gemm.precompile_problems import computed
from qsync_fx.devices import native_integer_unit
from qsync_fx.formats import Precision
from qsync_fx.graph import Context
from qsync_fx.graph.fx_utils import arguments, memory_order
from qsync_fx.ops import row_for
from qsync_fx.passes.lowering_registry import Lowering, Operands, Role, dimensions, extent


def _each(value: Any, spatial: int) -> list[Any]:
    """Return one number per spatial dimension; the schema lets a single one serve for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * spatial if len(values) == 1 else values


def _geometry(node: fx.Node) -> Geometry | None:
    """Return the arguments of `aten::convolution`; None if the padding is asymmetric."""
    result = arguments(node)
    spatial = dimensions(result["weight"]) - 2
    dilation = _each(result["dilation"], spatial)
    padding = result["padding"]
    if padding == "same":
        # torch pads the output to the size of the input, with an odd remainder at the end.
        total = [
            step * (int(size) - 1)
            for step, size in zip(dilation, result["weight"].meta["val"].shape[2:], strict=True)
        ]
        if any(size % 2 for size in total):
            return None
        padding = [size // 2 for size in total]
    elif padding == "valid":
        padding = 0
    output_padding = _each(result.get("output_padding", 0), spatial)
    return (
        _each(result["stride"], spatial),
        _each(padding, spatial),
        dilation,
        _transposed(node),
        output_padding,
        result["groups"],
    )


def _refuses(node: fx.Node) -> str | None:
    if _geometry(node) is None:
        return "its padding differs between the two sides, which needs a padded input"
    return None


def _slower(node: fx.Node, fmt: Precision, context: Context) -> str | None:
    if gpu_profitability.on_gpu(context.device):
        row = row_for(node.target)
        assert row is not None, node.format_node()
        return gpu_profitability.because(
            node, row, fmt, context, _emit, _keep if context.options.scaling == "channel" else _none
        )
    result, geometry = arguments(node), _geometry(node)
    x, weight = result["input"].meta["val"], result["weight"].meta["val"]
    if geometry is None or x.dim() != weight.dim():
        return None
    stride, *_, transposed, _, groups = geometry
    if fmt.plain:
        # As a matrix product: windows of all output positions, with the weight.
        out = x if transposed else node.meta["val"]
        places, channels, summed = map(
            extent, ((*out.shape[:1], *out.shape[2:]), weight.shape[:1], weight.shape[1:])
        )
        if places is None or channels is None or summed is None:
            return None
        return cpu_kernels.gemm_too_small(places, channels, summed, fmt)
    if not native_integer_unit():
        return (
            "the kernels of the native module have no INT8 unit on this CPU, so its "
            "convolutions run in bf16"
        )
    if transposed or groups != 1 or weight.dim() != 4:
        return (
            "the CPU kernel supports only 2-d convolutions that are neither transposed nor grouped"
        )
    return cpu_kernels.conv_too_small(weight.shape, stride)


def _emit(node: fx.Node, argument: Operands) -> fx.Node:
    geometry = _geometry(node)
    assert geometry is not None, "refused"
    (x, xq, x_scale), (w, wq, w_scale) = argument.operands
    tensors = x, w, arguments(node)["bias"], xq, x_scale, wq, w_scale, argument.seed
    value = node.meta["val"]
    order = memory_order(value) or list(range(value.dim()))
    arranged = (*geometry, order, argument.fmt, argument.rounding, argument.out_dtype)
    return node.graph.call_function(
        torch.ops.qsync.convolution.default, (*tensors, argument.stream, *arranged)
    )


def _transposed(node: fx.Node) -> bool:
    # An argument of the generic operators, part of the name of the others.
    return bool(arguments(node).get("transposed", "transpose" in str(node.target)))


def _keep(node: fx.Node, role: Role) -> list[int]:
    """Return the dimension with a scale per sample or per output channel.

    Grouped transposed convolutions have no dimension of their own for output channels.
    """
    result = arguments(node)
    if role == Role.ACTIVATION:
        return [0] if dimensions(result["input"]) == dimensions(result["weight"]) else []
    if not _transposed(node):
        return [0]
    return [1] if result["groups"] == 1 else []


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


LOWERINGS = tuple(
    Lowering(name, _emit, _keep, _refuses, computed, _with_right_gradients, slower=_slower)
    for name in (
        *(f"conv{spatial}d" for spatial in (1, 2, 3)),
        *(f"conv_transpose{spatial}d" for spatial in (1, 2, 3)),
        "convolution",
        "_convolution",
    )
)
