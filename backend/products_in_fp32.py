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

from qsync_fx.backend.inductor.layouts import convolution_format
from qsync_fx.backend.operators.registration import define
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


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies operands of a floating-point dtype on this CPU."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def decompositions(
    device: torch.device, table: Mapping[OpOverload, Decomposition]
) -> dict[OpOverload, Decomposition]:
    """Return decompositions of `PRODUCTS` for a device; those of `table` come first.

    Returns:
        {} if oneDNN multiplies 16-bit floats, or if the device is no CPU.
    """
    if device.type != "cpu" or all(map(multiplies, (torch.bfloat16, torch.float16))):
        return {}
    return {
        operator: functools.partial(_decompose, operator, ours, table.get(operator))
        for operator, ours in _in_fp32().items()
    }


def _decompose(
    operator: OpOverload, ours: OpOverload, first: Decomposition | None, *args: Any, **kwargs: Any
) -> Any:
    result = first(*args, **kwargs) if first else NotImplemented
    if result is not NotImplemented or args[0].device.type != "cpu" or multiplies(args[0].dtype):
        return result
    return ours(*args, **kwargs)


@functools.cache
def _in_fp32() -> dict[OpOverload, OpOverload]:
    """Register an operator `qsync::NAME_in_fp32` for each of `PRODUCTS`, with the same schema.

    Inductor omits conversions to 16 bits and back between operators, but not within one.
    """
    result = {}
    for operator in PRODUCTS:
        name = operator._schema.name.partition("::")[2]
        schema = str(operator._schema).replace(f"aten::{name}", f"{name}_in_fp32", 1)
        result[operator] = define(schema)(functools.partial(_compute, operator))
    return result  # type: ignore[return-value]


def _compute(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtype = args[0].dtype

    def widened(t: Tensor) -> Tensor:
        return t.float() if t.dtype == dtype else t

    results = operator(
        *tree_map_only(Tensor, widened, args), **tree_map_only(Tensor, widened, kwargs)
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
