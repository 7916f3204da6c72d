"""Lowering of torch's products to `qsync::linear`, `qsync::grouped` or `qsync::contract`.

Invariant: the operator's row says which factor is the weight, as the pass `classify` decided; the
contracted dimensions follow from the shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qsync_fx.backend.operators.gemm import cpu_kernels, gpu_profitability
from qsync_fx.backend.operators.gemm.precompile_problems import computed
from qsync_fx.formats import Precision
from qsync_fx.graph import Context, node_metadata
from qsync_fx.graph.fx_utils import arguments, memory_order
from qsync_fx.ops import OperatorRow, row_for
from qsync_fx.ops.matmul import Contraction
from qsync_fx.passes.lowering_registry import Lowering, Operands, Role, extent


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
    return result.unfit(weight) or (result if weight else result.turned)


def _refuses(node: fx.Node) -> str | None:
    result = _contraction(node)
    if isinstance(result, str):
        return result
    return (
        "only the CPU has a grouped product for it" if result.group and not _on_cpu(node) else None
    )


def _slower(node: fx.Node, fmt: Precision, context: Context) -> str | None:
    result = _contraction(node)
    if isinstance(result, str):
        return None
    if gpu_profitability.on_gpu(context.device):
        keep = _keep if context.options.scaling == "channel" else _separate
        return gpu_profitability.because(node, _row(node), fmt, context, _emit, keep)
    rows, channels, summed = (
        extent(result.sizes[letter] for letter in letters)
        for letters in (result.own(0), result.own(1), result.summed)
    )
    if fmt.scaled and (why := cpu_kernels.without_unit(context.device)) is not None:
        return why
    if rows is None or channels is None or summed is None:
        return None
    return cpu_kernels.gemm_too_small(rows, channels, summed, fmt)


def _on_cpu(node: fx.Node) -> bool:
    value: Tensor = node.meta["val"]
    return value.device.type == "cpu"


def _emit(node: fx.Node, argument: Operands) -> fx.Node:
    result = _contraction(node)
    assert not isinstance(result, str), "refused"
    (x, xq, x_scale), (w, wq, w_scale) = argument.operands
    settings = argument.fmt, argument.rounding, argument.out_dtype
    if result.group:
        tensors = x, w, arguments(node)["offs"], xq, x_scale, wq, w_scale, argument.seed
        return node.graph.call_function(
            torch.ops.qsync.grouped.default, (*tensors, argument.stream, *settings)
        )
    added = _row(node).added
    bias = list(arguments(node).values())[added[0]] if added else None
    tensors = x, w, bias, xq, x_scale, wq, w_scale, argument.seed
    if result.is_linear:
        return node.graph.call_function(
            torch.ops.qsync.linear.default, (*tensors, argument.stream, *settings)
        )
    value: Tensor = node.meta["val"]
    # Sizes that depend on values have no strides yet; the result is then row-major.
    shape = result.equation, memory_order(value) or list(range(value.dim()))
    return node.graph.call_function(
        torch.ops.qsync.contract.default, (*tensors, argument.stream, *shape, *settings)
    )


def _dimensions(node: fx.Node, role: Role, channels: bool) -> list[int]:
    result = _contraction(node)
    if isinstance(result, str):
        return []
    factor = 0 if role == Role.ACTIVATION else 1
    return result.channels(factor) if channels else result.separate(factor)


def _keep(node: fx.Node, role: Role) -> list[int]:
    return _dimensions(node, role, channels=True)


def _separate(node: fx.Node, role: Role) -> list[int]:
    return _dimensions(node, role, channels=False)


LOWERINGS = tuple(
    Lowering(name, _emit, _keep, _refuses, computed, separate=_separate, slower=_slower)
    for name in (
        *("linear", "addmm", "mm", "matmul", "linalg_matmul", "inner", "tensordot", "einsum"),
        *("mv", "addmv", "bmm", "baddbmm", "addbmm", "_grouped_mm", "grouped_mm"),
    )
)
