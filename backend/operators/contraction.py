"""`qsync::contract`: any product of an activation and a weight, as the linear layer that it is.

`x @ w`, `w @ x`, `addmm`, `bmm` and `einsum` differ in which dimensions they sum over and in the order of the others. Both factors are
looked at with their dimensions in the order of a layer, which copies nothing where a kernel takes the strides, and the result in the order
of the product.

Invariant: it is `qsync::linear` on those views, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qsync_fx.backend.operators.linear import linear
from qsync_fx.backend.operators.memory_order import in_order
from qsync_fx.backend.operators.product_utils import ProductArguments, define_product
from qsync_fx.ops.contractions import STRETCHED, Contraction


def contract(value: ProductArguments, equation: str, order: Sequence[int]) -> Tensor:
    """Computes the product of `x` and `weight` that an equation names, and its gradients, as `qsync::linear` does.

    Args:
        given: scales are `[]` or of their operand's shape with 1 where the scale does not vary.
        equation: one letter a dimension, "amk,kn->amn"; "1" for a dimension of size 1 that is stretched. What both factors and the result
            have is a dimension of layers side by side.
        order: the dimensions of the result from the outermost in memory to the innermost.
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
    """Returns a tensor, or its scale, with its dimensions in the order of a layer: side by side, rows, summed over.

    Each of the three is one dimension. There is no first where there are no layers side by side, and then the rows of an activation may
    have any number of dimensions.
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
