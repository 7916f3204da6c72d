"""`qsync::conv2d_product`: one of the three products of a 2-D convolution, with scales and bias in its epilogue.

Convolutions as implicit matrix products: kernels gather their operands from channels-last memory as they go, nothing is unfolded. On the
CPU the native module does so for INT8, to the bits of plain torch, which all else is there.

Invariant: as of `qsync::gemm`. One operator for the three products, because they share everything but what is contracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import ConvOperation, fallback
from qsync_fx.backend.cuda.run import launch
from qsync_fx.backend.operators.gradients.live_taps import places
from qsync_fx.backend.operators.library import define, require
from qsync_fx.backend.operators.multiplying import conv_on_cpu
from qsync_fx.backend.operators.multiplying.gemm import check_scale, check_types
from qsync_fx.errors import OptionError, nearest

_WHERE = "qsync::conv2d_product"


def conv2d_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    operation: str,
    out_dtype: torch.dtype = torch.float32,
    tf32: bool = False,
) -> Tensor:
    """Computes a convolution's output ("fprop"), input gradient ("dgrad") or weight gradient ("wgrad"), groups = 1.

    `d = product(a, b) * a_scale * b_scale + bias` with sums as in `qsync::gemm`.

    Args:
        a: fprop: x `[N, C, H, W]`; dgrad and wgrad: the gradient of y, `[N, K, P, Q]`. Types as in `qsync::gemm`, any strides; kernels
            want channels last.
        b: fprop and dgrad: the weight `[K, C, R, S]`; wgrad: x.
        a_scale: FP32, `[]`, or None.
        b_scale: FP32, `[]`, for fprop also `[1, K, 1, 1]`, or None.
        bias: floating point, `[K]`, for fprop; else None.
        size: dgrad: `[H, W]`; wgrad: `[R, S]`, which the shapes of the operands do not say; fprop: `[R, S]`.
        stride, padding, dilation: of the convolution, for height and width.
        operation: which product.
        out_dtype, tf32: as in `qsync::gemm`.

    Returns:
        y, the gradient of x, or that of the weight; its channels lie last in memory.
    """
    how = (list(size), list(stride), list(padding), list(dilation), operation, out_dtype, tf32)
    found: Tensor = torch.ops.qsync.conv2d_product.default(a, b, a_scale, b_scale, bias, *how)
    return found


class _Asked(NamedTuple):
    """What the operator is given, in the order of its schema."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    operation: str
    out_dtype: torch.dtype
    tf32: bool

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.a, self.b, self.a_scale, self.b_scale, self.bias

    @property
    def geometry(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
        return self.size, self.stride, self.padding, self.dilation


def _shape(
    a: Tensor,
    b: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    operation: ConvOperation,
) -> tuple[int, ...]:
    """Returns the shape of the result; raises where those of the operands do not belong together."""
    if operation == "dgrad":
        inputs, weight, outputs = (a.shape[0], b.shape[1], *size), tuple(b.shape), tuple(a.shape)
    elif operation == "wgrad":
        inputs, weight, outputs = tuple(b.shape), (a.shape[1], b.shape[1], *size), tuple(a.shape)
    else:
        require(a.shape[1] == b.shape[1], lambda: f"{_WHERE}: {a.shape[1]} channels, the weight has {b.shape[1]}")
        inputs, weight, outputs = tuple(a.shape), tuple(b.shape), (a.shape[0], b.shape[0])
    windows = zip(inputs[2:], weight[2:], stride, padding, dilation, strict=True)
    spatial = [places(*window) for window in windows]
    if operation == "fprop":
        return (*outputs, *spatial)
    require(outputs[1] == weight[0], lambda: f"{_WHERE}: {outputs[1]} channels, the weight gives {weight[0]}")
    require(inputs[0] == outputs[0], lambda: f"{_WHERE}: batches of {inputs[0]} and {outputs[0]}")
    for have, want in zip(outputs[2:], spatial, strict=True):
        require(have == want, lambda: f"{_WHERE}: the gradient is {list(outputs[2:])}, not {spatial}")
    return inputs if operation == "dgrad" else weight


def _checked(x: _Asked) -> tuple[ConvOperation, tuple[int, ...]]:
    """Returns the operation and the shape of the result; raises where the operator cannot compute this."""
    if x.operation not in get_args(ConvOperation):
        known = get_args(ConvOperation)
        raise OptionError(
            f"{x.operation!r} is no product of a convolution", where=_WHERE, do=nearest(x.operation, known)
        )
    which = cast(ConvOperation, x.operation)
    check_types(x.a, x.b, x.out_dtype, _WHERE)
    require(x.a.dim() == 4 and x.b.dim() == 4, lambda: f"{_WHERE}: operands have four dimensions")
    require(all(len(part) == 2 for part in x.geometry), lambda: f"{_WHERE}: sizes are for height and width")
    shape = _shape(x.a, x.b, *x.geometry, which)
    require(x.a_scale is None or x.a_scale.dim() == 0, lambda: f"{_WHERE}: a_scale is one number")
    require(which == "fprop" or x.bias is None, lambda: f"{_WHERE}: only fprop has a bias")
    require(which == "fprop" or x.b_scale is None or x.b_scale.dim() == 0, lambda: f"{_WHERE}: b_scale is one number")
    check_scale(x.a_scale, (), "a_scale", _WHERE)
    check_scale(x.b_scale, (1, shape[1], 1, 1), "b_scale", _WHERE)
    bias = x.bias
    if bias is not None:
        require(bias.dim() == 1 and bias.shape[0] == shape[1], lambda: f"{_WHERE}: bias is [{shape[1]}]")
    return which, shape


def _fake(*given: Any) -> Tensor:
    x = _Asked(*given)
    _, shape = _checked(x)
    return torch.empty(shape, dtype=x.out_dtype, device=x.a.device, memory_format=torch.channels_last)


def _on_cpu(*given: Any) -> Tensor:
    x = _Asked(*given)
    operation, shape = _checked(x)
    native = conv_on_cpu.multiplies(x.a, x.b, x.stride, operation) and 0 not in (*x.a.shape, *x.b.shape, *shape)
    compute = conv_on_cpu.conv2d_product if native else fallback.conv2d_product
    return compute(*x.operands, *x.geometry, operation, x.out_dtype)


def _kernel(*given: Any) -> Tensor:
    # The order is the schema's. Whether there is such a product is asked once for operands that lie alike.
    return launch.conv2d_product(*given, check=_check_given)


def _check_given(*given: Any) -> None:
    _checked(_Asked(*given))


define(
    "conv2d_product(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, SymInt[] size, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, str operation, ScalarType out_dtype, bool tf32) -> Tensor",
    {"CPU": _on_cpu, "CUDA": _kernel},
    _fake,
    tags=(),  # See `qsync_fx.backend.inductor.tuned`.
)
