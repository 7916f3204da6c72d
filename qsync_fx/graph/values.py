"""What a node's value is: a fake tensor, several, or none; which format it has, and how texts of graphs show it.

Invariant: works on any value, and on symbolic sizes; it computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from qsync_fx.precision import Precision, precision_of

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "b1",
}  # fmt: skip


def is_float(value: Any) -> bool:
    """Whether a value is a tensor of a floating-point type that torch computes in: one that a plan may change.

    Float8 and Float4 only store: the model has quantized there by itself, and hardly an operator takes them.
    """
    return isinstance(value, torch.Tensor) and precision_of(value.dtype) is not None


def storage_of(tensor: torch.Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others, as long as these live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)  # sparse tensors, and those of vmap, show none


def is_alias(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors lie in one memory."""
    return storage_of(first) == storage_of(second)


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a node's value: one, several, or none."""
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def memory_order(value: Any) -> list[int] | None:
    """Return the dimensions of a tensor from the outermost in memory to the innermost.

    Symbolic sizes are replaced by the sizes of the example, without a guard. Of equal strides the
    dimension of size 1 is the inner one, as in new tensors of any memory format.

    Returns:
        None for a tensor that is not dense in memory or has no elements, and for unbacked sizes.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, strides = ([_hint(number) for number in numbers] for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides or 0 in sizes:
        return None
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return order


def same_strides(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal strides, except along dimensions of size 1.

    The result is True if one is not dense: its copy is dense, and supports every view of the original.
    """
    orders = [memory_order(value) for value in (first, second)]
    if None in orders or first.shape != second.shape:
        return True
    of_first, of_second = ([dim for dim in order or () if _hint(first.shape[dim]) != 1] for order in orders)
    return of_first == of_second


def _hint(number: Any) -> Any:
    return number.node.hint if isinstance(number, torch.SymInt) else number


def format_of(value: Any) -> Precision | None:
    """Returns the format of a node's value, that of its first floating-point tensor; None where there is none."""
    floats = [t for t in tensors(value) if is_float(t)]
    return precision_of(floats[0].dtype) if floats else None


def describe(value: Any) -> str:
    """Returns the short text of a value: `f32[8, 16]`, `s0`, `(f32[8], i64[8])`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe(item) for item in value) + ")"
    # Other objects print their address, which differs from run to run.
    return str(value) if isinstance(value, (int, float, str, torch.SymInt)) else type(value).__name__


def expression(size: Any) -> Any:
    """Returns a size as a whole number, or as a sympy expression where it is symbolic."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
