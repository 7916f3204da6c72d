"""`qsync::contract`: any product of an activation and a weight, computed as a linear layer.

`x @ w`, `w @ x`, `addmm`, `bmm` and `einsum` differ in the contracted dimensions and in the order
of the others. Both factors are viewed with their dimensions in the order of a linear layer, without
a copy if a kernel accepts the strides; the result is permuted back.

Invariant: equal to `qsync::linear` on these views, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qsync_fx.backend.operators.linear import linear
from qsync_fx.backend.operators.memory_order import in_order
from qsync_fx.backend.operators.product_utils import ProductArguments, define_product
from qsync_fx.ops.matmul import STRETCHED, Contraction


def contract(value: ProductArguments, equation: str, order: Sequence[int]) -> Tensor:
    """Compute the product of `x` and `weight` in `equation`, and its gradients, by `linear`.

    Args:
        value: the shared arguments; scales are `[]` or have 1 in the dimensions along which they
            are constant.
        equation: one letter per dimension, "amk,kn->amn"; "1" for a broadcast dimension of size 1.
            A letter of both factors and the result is a batch dimension.
        order: dimensions of the result from the outermost in memory to the innermost.
    """
    factors, _, result = equation.partition("->")
    item, other = factors.split(",")
    c = Contraction((item, other), result, (0, 1))
    owned, channels = c.own(0), c.own(1)
    sizes = dict(zip(item, value.x.shape, strict=True)) | dict(
        zip(other, value.weight.shape, strict=True)
    )
    a, b = (c.batch, owned, c.summed), (c.batch, channels, c.summed)
    as_a_layer = value._replace(
        x=_arranged(value.x, item, a),
        weight=_arranged(value.weight, other, b, columns=True),
        xq=_arranged(value.xq, item, a),
        x_scale=_scale(value.x_scale, item, a),
        wq=_arranged(value.wq, other, b, columns=True),
        w_scale=_scale(value.w_scale, other, b, columns=True),
    )
    made = c.batch + owned + channels
    y = linear(as_a_layer).reshape([sizes[letter] for letter in made])
    return in_order(y.permute([made.index(letter) for letter in result]), order)


def _scale(
    scale: Tensor | None, letters: str, parts: tuple[str, str, str], columns: bool = False
) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else _arranged(scale, letters, parts, columns)


def _arranged(
    t: Tensor, letters: str, parts: tuple[str, str, str], columns: bool = False
) -> Tensor:
    """Return a tensor, or its scale, with its dimensions in the order batch, rows, contracted.

    Each of the three is flattened to one dimension. Without a batch there is no first dimension,
    and the rows of an activation keep theirs.
    """
    for index in reversed([index for index, letter in enumerate(letters) if letter == STRETCHED]):
        t = t.squeeze(index)
    letters = letters.replace(STRETCHED, "")
    batch, rows, summed = parts
    t = t.permute([letters.index(letter) for letter in batch + rows + summed])
    if len(summed) > 1:
        t = t.flatten(-len(summed))
    if batch or columns:
        t = t.flatten(len(batch), -2) if rows else t.unsqueeze(-2)
    return t.flatten(0, len(batch) - 1) if batch else t


define_product("contract", contract, owned="str equation, int[] order")
