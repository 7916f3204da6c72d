"""Layers whose narrow products a GPU would compute in a wider format.

The check runs before their operands are quantized. A kernel is selected by problem, and a lowered
layer determines its problems, so the layer is lowered on trial in a separate graph. The final
output dtype is not known yet; a layer counts as wide only if it is with both candidates.

Invariant: the layer's own graph does not change, and `select.decide` returns the same decisions
later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.runtime.device_state import decision
from qsync_fx.backend.cuda.tuning import NARROW
from qsync_fx.backend.operators.gemm.precompile_problems import (
    NONE_LIKE_IT,
    problems_of_layer,
    valueless,
)
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.devices import row_on
from qsync_fx.devices.format_support import ANY, capability
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.graph import Context
from qsync_fx.graph.fx_utils import argument_at, arguments
from qsync_fx.ops import OperatorRow
from qsync_fx.passes.lowering_registry import Operands, Role

Emit = Callable[[fx.Node, Operands], fx.Node]
Dimensions = Callable[[fx.Node, Role], list[int]]


def _seed() -> Tensor:
    with _disable_current_modes(), disable_proxy_modes_tracing():
        return torch.empty(1, dtype=torch.int64, device="meta")


def on_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, or represents one."""
    return device.type != "cpu" or capability(device) != ANY


def because(
    node: fx.Node, row: OperatorRow, fmt: Precision, context: Context, emit: Emit, keep: Dimensions
) -> str | None:
    """Return why no product of a layer would use a narrow unit; None if one would, or if unknown.

    Args:
        node, row: the layer as torch's operator, and its row.
        fmt: the format to which it would be lowered.
        emit, keep: as in `Lowering`.
    """
    if not fmt.scaled:
        return None
    requested = _problems_on_trial(node, row, fmt, context, emit, keep)
    if requested is None:
        return None
    narrow = [p for p in requested if p.a in NARROW or p.b in NARROW]
    if not narrow:
        # torch has no narrow convolution. For stacks of matrices its choice depends on more than
        # the problem.
        return NONE_LIKE_IT if row.contracts is None else None
    result = [decision(problem, context.device) for problem in narrow]
    if any(
        item.config is not None or (item.integers and _by_cublas(p))
        for p, item in zip(narrow, result, strict=True)
    ):
        return None
    return result[0].reason


def _by_cublas(problem: Problem) -> bool:
    """Return whether torch has a product of such operands, without casts to a wider format."""
    return (
        isinstance(problem, GemmProblem)
        and FORMATS[problem.a].kind == FORMATS[problem.b].kind == "integer"
    )


def _problems_on_trial(
    node: fx.Node, row: OperatorRow, fmt: Precision, context: Context, emit: Emit, keep: Dimensions
) -> list[Problem] | None:
    """Return the problems of a lowered layer for both output dtypes; None if a size is unknown."""
    trial = fx.Graph()
    stand_ins: dict[fx.Node, fx.Node] = {}
    for used in node.all_input_nodes:
        # The kind of node that an operand is decides whether it requires a gradient.
        stand_ins[used] = trial.create_node(used.op, used.target, name=used.name)
        stand_ins[used].meta["val"] = used.meta.get("val")
    layer = trial.node_copy(node, lambda used: stand_ins[used])

    def made(value: Any) -> fx.Node:
        placeholder = trial.placeholder("made")
        placeholder.meta["val"] = value
        return placeholder

    seed = made(_seed())
    inputs = tuple(arguments(layer).values())
    operands = []
    for index, role in zip(row.scaled, Role, strict=True):
        operand = argument_at(inputs, index)
        value = valueless(operand)
        if not isinstance(value, Tensor):
            return None
        with _disable_current_modes(), disable_proxy_modes_tracing(), torch.no_grad():
            settings = context.options.rounding, keep(layer, role)
            q, scale = quantize(value, seed.meta["val"], 0, fmt.name, *settings)
        operands.append((operand, made(q), made(scale)))
    first, second = operands
    problems: dict[Problem, None] = {}
    for out in (row_on(context.device, fmt).output.dtype, torch.float32):
        lowered = emit(
            layer, Operands((first, second), seed, 0, fmt.name, context.options.rounding, out)
        )
        lowered.meta["val"] = node.meta["val"]
        problems |= dict.fromkeys(problems_of_layer(lowered))
    return list(problems)
