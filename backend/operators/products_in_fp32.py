"""Products of BF16 and FP16 operands in FP32, for CPUs without AVX-512.

There oneDNN has no product of 16-bit operands, and torch's own loops take 5 to 70 times as long as
FP32, unfold the input of convolutions, and add input gradients of convolutions in BF16. Operators
of ours convert the operands, which is exact, and round the result once: these are the numerics of a
unit for the format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.operators.convert import convolution_format
from qsync_fx.backend.operators.registration import define
from qsync_fx.devices import cpu_features
from qsync_fx.torch_internals import OpOverload, tree_map_only

aten = torch.ops.aten

Decomposition = Callable[..., Any]

_ATTENTION: Final = aten._scaled_dot_product_flash_attention_for_cpu.default

PRODUCTS: Final[tuple[OpOverload, ...]] = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    _ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Operators that the decompositions replace."""


def widened(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the 16-bit types that oneDNN does not multiply; none on a GPU."""
    return cpu_features.multiplied_in_fp32() if device.type == "cpu" else ()


def called(operator: OpOverload, operand: Tensor) -> OpOverload:
    """Return the operator to call for one of `PRODUCTS`, whose operands are like `operand`."""
    return IN_FP32[operator] if operand.dtype in widened(operand.device) else operator


def decompositions(table: Mapping[OpOverload, Decomposition]) -> dict[OpOverload, Decomposition]:
    """Return decompositions of `PRODUCTS` into the operator that `called` names.

    A decomposition in `table` comes first.
    """
    return {
        operator: functools.partial(_decompose, operator, table.get(operator))
        for operator in PRODUCTS
    }


def _decompose(operator: OpOverload, first: Decomposition | None, *args: Any, **kwargs: Any) -> Any:
    result = first(*args, **kwargs) if first else NotImplemented
    if result is not NotImplemented or (ours := called(operator, args[0])) is operator:
        return result
    return ours(*args, **kwargs)


def _compute(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtype = args[0].dtype

    def in_fp32(t: Tensor) -> Tensor:
        return t.float() if t.dtype == dtype else t

    results = operator(
        *tree_map_only(Tensor, in_fp32, args), **tree_map_only(Tensor, in_fp32, kwargs)
    )
    # The second result of attention, the logarithms of its sums, is FP32 for any dtype.
    if operator is _ATTENTION:
        return results[0].to(dtype), results[1]
    if operator is aten.convolution.default:
        # oneDNN may select another layout than fake tensors.
        return results.to(dtype, memory_format=convolution_format(args[0], args[1]))
    if operator is aten.convolution_backward.default:
        layout = convolution_format(args[1], args[2])
        *of_operands, of_bias = results
        of_operands = [t if t is None else t.to(dtype, memory_format=layout) for t in of_operands]
        return *of_operands, of_bias if of_bias is None else of_bias.to(dtype)
    return tree_map_only(Tensor, lambda t: t.to(dtype), results)


def _define(operator: OpOverload) -> OpOverload:
    """Register the operator `qsync::NAME_in_fp32` of the same schema.

    Inductor omits conversions to 16 bits and back between operators, but not within one.
    """
    name = operator._schema.name.partition("::")[2]
    schema = str(operator._schema).replace(f"aten::{name}", f"{name}_in_fp32", 1)
    compute: Any = functools.partial(_compute, operator)
    return define(schema)(compute)


IN_FP32: Final = {operator: _define(operator) for operator in PRODUCTS}
"""The operators that replace `PRODUCTS`. Code from Inductor's cache requires them on import."""
