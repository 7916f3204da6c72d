"""List the qsync products in Inductor's generated code with the layouts of their operands.

Invariant: layouts are final when they are read, so the list contains the kernels' arguments.
Products in plans have the same format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem import (
    ConvProduct,
    GemmProduct,
    conv_problem,
    gemm_problem,
)
from qsync_fx.backend.cuda.tuning import shown


def told(problem: Problem) -> str:
    """Return one line with the properties that select a kernel."""
    scales = f"scales {problem.a_scale} and {problem.b_scale}"
    return f"{shown(problem)}, {scales}, {'bias' if problem.bias else 'no bias'}"


def products(operations: list[Any]) -> Iterator[str]:
    """Yield each qsync product among the operations of a graph, and whether operands are copied."""
    from torch._inductor import ir

    for operation in operations:
        if not isinstance(operation, ir.FallbackKernel):
            continue
        if operation.op_overload not in (
            torch.ops.qsync.gemm.default,
            torch.ops.qsync.conv2d_product.default,
        ):
            continue
        inputs = iter(operation.inputs)
        a, b, *others = [
            _as_it_lies(next(inputs), x) if isinstance(x, torch.fx.Node) else x
            for x in operation.fx_node.args
        ]
        problem = _gemm(a, b, *others) if a.dim() == 2 else _conv(a, b, *others)
        # Matrix layouts are part of the problem. Image kernels need channels-last operands; others
        # are copied in each call.
        copied = a.dim() == 4 and not all(
            t.is_contiguous(memory_format=torch.channels_last) for t in (a, b)
        )
        yield told(problem) + (", operands not channels last" if copied else "")


def _as_it_lies(operand: Any, node: torch.fx.Node) -> torch.Tensor:
    sizes, strides = (tuple(map(int, of())) for of in (operand.get_size, operand.get_stride))
    return torch.empty_strided(sizes, strides, dtype=node.meta["val"].dtype, device="meta")


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    out: Any,
    tf32: bool,
    transposed: bool = False,
) -> GemmProblem:
    return gemm_problem(
        GemmProduct(a, b.t() if transposed else b, a_scale, b_scale, bias, out, tf32)
    )


def _conv(a: torch.Tensor, b: torch.Tensor, *arguments: Any) -> ConvProblem:
    return conv_problem(ConvProduct(a, b, *arguments))
