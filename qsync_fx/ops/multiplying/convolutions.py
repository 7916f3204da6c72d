"""Convolutions: products of an activation and a weight, so they take every format."""

from __future__ import annotations

import math
from typing import Any

from qsync_fx.ops.row import Flops, Kind, OperatorRow

REASON = "a convolution of an activation by a weight: the plan chooses its precision"


def forward(args: tuple[Any, ...], output: Any) -> Any:
    """Each output value is a product over `weight[0]`, whose shape [in / groups, *kernel] accounts for groups."""
    return 2 * output.numel() * math.prod(args[1].shape[1:])


def transposed(args: tuple[Any, ...], output: Any) -> Any:
    """Each input value is spread over `weight[0]`, here of shape [out / groups, *kernel]."""
    return 2 * args[0].numel() * math.prod(args[1].shape[1:])


def either(args: tuple[Any, ...], output: Any) -> Any:
    """`convolution(input, weight, bias, stride, padding, dilation, transposed, ...)`."""
    return transposed(args, output) if args[6] else forward(args, output)


def row(name: str, flops: Flops) -> OperatorRow:
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        REASON,
        operands=(0, 1, 2),
        scaled=(0, 1),
        products=True,
        added=(2,),
        flops=flops,
    )


ROWS = (
    row("conv1d", forward),
    row("conv2d", forward),
    row("conv3d", forward),
    row("conv_transpose1d", transposed),
    row("conv_transpose2d", transposed),
    row("conv_transpose3d", transposed),
    row("convolution", either),
    row("_convolution", either),
)
