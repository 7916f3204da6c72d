"""Quantization that Inductor fuses, for CUDA devices without a quantization kernel.

Inductor generates a reduction and a pointwise pass, instead of two hundred launches. Two parts are
opaque operators with pointwise lowerings: `qsync::uniform` and `qsync::divide`. Invariant: the bits
of `qsync::quantize` on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import torch
from torch import SymInt, Tensor

from qsync_fx import torch_internals as internals
from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.numerics import philox, reference
from qsync_fx.backend.operators.quantize import scaled_format
from qsync_fx.backend.operators.registration import define
from qsync_fx.formats import precision
from qsync_fx.rounding import rounding_mode


def _uniform_fake(
    size: Sequence[int | SymInt], stride: Sequence[int | SymInt], seed: Tensor, stream: int
) -> Tensor:
    return torch.empty_strided(size, stride, device=seed.device)


@define(
    "uniform(SymInt[] size, SymInt[] stride, Tensor seed, int stream) -> Tensor", fake=_uniform_fake
)
def uniform(
    size: Sequence[int | SymInt], stride: Sequence[int | SymInt], seed: Tensor, stream: int
) -> Tensor:
    """Return `philox.uniform`, FP32, for a tensor of this size and dense strides."""
    return philox.uniform(_uniform_fake(size, stride, seed, stream), seed, stream)


@define("divide(Tensor a, Tensor b) -> Tensor")
def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return `a / b` of FP32 tensors, rounded once; GPU compilers divide with an error of 2 ulp."""
    return a / b


def quantize(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `(q, scale)` as `qsync::quantize` does; `x` is not empty."""
    row, mode = scaled_format(fmt, x, keep), rounding_mode(rounding)
    q = reference.empty_quantized(x, row.dtype)
    scale = reference.scales(x, row, keep, divide)
    random = uniform(q.size(), q.stride(), seed, stream) if mode == "stochastic" else None
    rounded = reference.to_grid(divide(x.float(), scale), row, mode, random)
    return torch.where(scale.isnan(), torch.zeros_like(rounded), rounded).to(row.dtype), scale


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(q, transpose, scale)` as `qsync::quantize_transposed` does."""
    q, scale = quantize(x, seed, stream, fmt, rounding, ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale


def decompositions(device: torch.device) -> dict[internals.OpOverload, Callable[..., Any]]:
    """Return decompositions of the quantizers for CUDA devices without kernels, else {}."""
    if device.type != "cuda":
        return {}

    def without_kernel(decomposed: Callable[..., Any]) -> Callable[..., Any]:
        def decompose(x: Tensor, seed: Tensor, stream: int, fmt: str, *settings: Any) -> Any:
            if quantize_launch.fused(x, precision(fmt)):
                return decomposed(x, seed, stream, fmt, *settings)
            return NotImplemented

        return decompose

    operators = torch.ops.qsync
    return {
        operators.quantize.default: without_kernel(quantize),
        operators.quantize_transposed.default: without_kernel(quantize_transposed),
    }


def register() -> None:
    """Register the lowerings with Inductor."""
    operators, settings = torch.ops.qsync, {"type_promotion_kind": None}
    internals.register_lowering(operators.uniform.default, **settings)(_lower_uniform)
    division = internals.register_lowering(operators.divide.default, broadcast=True, **settings)
    division(internals.make_pointwise(_divide_exactly))


class _Word:
    """An int64 value in an Inductor kernel, with the operators that `philox` uses."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _by(self, name: str, other: _Word) -> _Word:
        ops = internals.inductor_ops
        return _Word(getattr(ops, name)(self.value, other.value))

    __mul__ = partialmethod(_by, "mul")
    __add__ = partialmethod(_by, "add")
    __xor__ = partialmethod(_by, "bitwise_xor")
    __and__ = partialmethod(_by, "bitwise_and")
    __rshift__ = partialmethod(_by, "bitwise_right_shift")


def _constant(value: int) -> Any:
    ops = internals.inductor_ops
    return _Word(ops.constant(value, torch.int64))


def _lower_uniform(size: Sequence[Any], stride: Sequence[Any], seed: Any, stream: int) -> Any:
    import sympy

    ops = internals.inductor_ops
    load, position = seed.make_loader(), [sympy.Integer(0)] * len(seed.get_size())

    def draw(index: Sequence[Any]) -> Any:
        offset = sum((i * step for i, step in zip(index, stride, strict=True)), sympy.Integer(0))
        place: Any = _Word(ops.index_expr(offset, torch.int64))
        key, eighth = _Word(load(position)), place >> _constant(3)
        counter = (
            philox.low(eighth, _constant),
            philox.high(eighth, _constant),
            _constant(stream & 0xFFFFFFFF),
            _constant(0),
        )
        keys = philox.low(key, _constant), philox.high(key, _constant)
        *others, last = philox.philox4x32(*counter, *keys, _constant)
        # Two of eight consecutive elements share a 32-bit word.
        pair, word = (place >> _constant(1)) & _constant(3), last.value
        for part, other in enumerate(others):
            word = ops.where(ops.eq(pair.value, _constant(part).value), other.value, word)
        odd = ops.ne((place & _constant(1)).value, _constant(0).value)
        high, low = _Word(word) >> _constant(16), _Word(word) & _constant(0xFFFF)
        half = ops.where(odd, high.value, low.value)
        sixteen = ops.add(ops.to_dtype(half, torch.float32), ops.constant(0.5, torch.float32))
        return ops.mul(sixteen, ops.constant(2.0**-16, torch.float32))

    return internals.Pointwise.create(
        device=seed.get_device(), dtype=torch.float32, inner_fn=draw, ranges=list(size)
    )


def _divide_exactly(x: Any, y: Any) -> Any:
    ops = internals.inductor_ops
    if hasattr(internals.OpsHandler, "div_rn"):  # `ops` has any name; not in torch 2.11
        return ops.div_rn(x, y)
    # FP64 has more than twice the bits of FP32, so rounding its quotient again is correct.
    wide = ops.truediv(ops.to_dtype(x, torch.float64), ops.to_dtype(y, torch.float64))
    return ops.to_dtype(wide, torch.float32)
