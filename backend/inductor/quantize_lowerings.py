"""Inductor lowerings for fusible quantization (`qsync_fx.backend.operators.fusible_quantize`).

Invariant: `qsync::uniform` and `qsync::divide` are pointwise, so that Inductor fuses them into the
rounding, and return the bits of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.numerics import philox
from qsync_fx.backend.operators import fusible_quantize
from qsync_fx.formats import precision


def decompositions(device: torch.device) -> dict[OpOverload, Callable[..., Any]]:
    """Return decompositions of the quantizers for CUDA devices without kernels, else {}."""
    if device.type != "cuda":
        return {}

    def instead(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(
            x: torch.Tensor, seed: torch.Tensor, stream: int, fmt: str, *settings: Any
        ) -> Any:
            return (
                write(x, seed, stream, fmt, *settings)
                if quantize_launch.fused(x, precision(fmt))
                else NotImplemented
            )

        return written

    operators = torch.ops.qsync
    return {
        operators.quantize.default: instead(fusible_quantize.quantize),
        operators.quantize_transposed.default: instead(fusible_quantize.quantize_transposed),
    }


def register() -> None:
    """Register the lowerings with Inductor."""
    from torch._inductor.lowering import register_lowering

    register_lowering(torch.ops.qsync.uniform.default, type_promotion_kind=None)(_lower_uniform)
    register_lowering(torch.ops.qsync.divide.default, broadcast=True, type_promotion_kind=None)(
        _lower_divide
    )


class _Word:
    """An int64 value in an Inductor kernel, with the operators that `philox` uses."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __mul__(self, other: _Word) -> _Word:
        return self._by("mul", other)

    def __add__(self, other: _Word) -> _Word:
        return self._by("add", other)

    def __xor__(self, other: _Word) -> _Word:
        return self._by("bitwise_xor", other)

    def __and__(self, other: _Word) -> _Word:
        return self._by("bitwise_and", other)

    def __rshift__(self, other: _Word) -> _Word:
        return self._by("bitwise_right_shift", other)

    def _by(self, name: str, other: _Word) -> _Word:
        from torch._inductor.virtualized import ops

        return _Word(getattr(ops, name)(self.value, other.value))


def _constant(value: int) -> _Word:
    from torch._inductor.virtualized import ops

    return _Word(ops.constant(value, torch.int64))


def _lower_uniform(size: Sequence[Any], stride: Sequence[Any], seed: Any, stream: int) -> Any:
    import sympy
    from torch._inductor.ir import Pointwise
    from torch._inductor.virtualized import ops

    load, position = seed.make_loader(), [sympy.Integer(0)] * len(seed.get_size())

    def drawn(index: Sequence[Any]) -> Any:
        place = _Word(
            ops.index_expr(
                sum((i * step for i, step in zip(index, stride, strict=True)), sympy.Integer(0)),
                torch.int64,
            )
        )
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
        half = ops.where(
            odd, (_Word(word) >> _constant(16)).value, (_Word(word) & _constant(0xFFFF)).value
        )
        sixteen = ops.add(ops.to_dtype(half, torch.float32), ops.constant(0.5, torch.float32))
        return ops.mul(sixteen, ops.constant(2.0**-16, torch.float32))

    return Pointwise.create(
        device=seed.get_device(), dtype=torch.float32, inner_fn=drawn, ranges=list(size)
    )


def _lower_divide(a: Any, b: Any) -> Any:
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.virtualized import ops

    return make_pointwise(lambda x, y: _rounded_once(ops, x, y))(a, b)


def _rounded_once(ops: Any, x: Any, y: Any) -> Any:
    if hasattr(ops, "div_rn"):
        return ops.div_rn(x, y)
    # FP64 has more than twice the bits of FP32, so rounding its quotient again is correct.
    wide = ops.truediv(ops.to_dtype(x, torch.float64), ops.to_dtype(y, torch.float64))
    return ops.to_dtype(wide, torch.float32)
