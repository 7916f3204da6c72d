"""The specification of operator rows: frozen, declarative facts about ATen operators.

Invariant: a row has no state. Passes query rows and never name operators themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsync_fx.ops.matmul import Contraction

Place = int | tuple[int, int]
"""Position of an operand: an argument index, or (index, item) for an item of a list."""

Flops = Callable[[tuple[Any, ...], Any], Any]
"""Maps (arguments with tensors instead of nodes, output tensor) to the forward FLOPs.

A multiply-add counts 2. Shapes may be symbolic; the result is then a `torch.SymInt`.
"""


class Kind(enum.StrEnum):
    """Who decides a precision (QSync, IV-B): the plan, the inputs' promotion, or the model."""

    ADJUSTABLE = "adjustable"
    DEPENDENT = "dependent"
    FIXED = "fixed"


@dataclass(frozen=True)
class OperatorRow:
    """One operator.

    Attributes:
        name: the operator's name in ids, plans and reports, such as "linear".
        targets: its ATen operators, such as "aten::linear". An overload is named only if it differs
            from its operator: "aten::view.dtype" reinterprets bits as another dtype.
        kind: who decides its precision.
        reason: why it has this kind, in words for users.
        operands: adjustable only: positions of the tensor arguments that are converted to the
            precision: tensors, lists of tensors, None, or boolean masks, which are not converted.
        scaled: adjustable only: places of (activation, weight) for operators that accept scaled
            formats (INT8, FP8); empty for float formats only.
        contracts: for products whose factors need not be an activation and a weight: maps
            arguments, with tensors instead of nodes, to the contraction, or to the reason why the
            product is not a layer's. `classify` finds the weight and sets `scaled`.
        unscaled: why it accepts no scaled format; "" if the reason is that no factor is a weight.
        output_only: adjustable only: the result is converted instead of the operands, which gives
            the same values at lower cost (an embedding gathers few rows of a large table).
        alone: adjustable only: (position, position of its partner): the argument is an operand only
            if the partner is None.
        products: whether it consists of matrix products, the only operators with formats like TF32.
        writes: positions of arguments that it may write to although its schema does not say so.
        added: products only: positions of operands that are added to the product: a bias, a mask.
        moves: its result has values of its first argument, at positions that do not depend on
            values.
        converts: it is a conversion of the model: it accepts any format and returns the named one.
        loss: fixed only: it is a loss or computes its input, and reads no operand that was narrowed
            for it.
        flops: forward floating-point operations; None if they are negligible next to the bytes
            moved.
        gradient_flops: operations of all gradients together; None if each gradient costs as much as
            the forward product.
    """

    name: str
    targets: tuple[str, ...]
    kind: Kind
    reason: str
    _: KW_ONLY
    operands: tuple[int, ...] = ()
    scaled: tuple[Place, ...] = ()
    contracts: Callable[[Sequence[Any]], Contraction | str] | None = None
    unscaled: str = ""
    output_only: bool = False
    alone: tuple[int, int] | None = None
    products: bool = False
    writes: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    moves: bool = False
    converts: bool = False
    loss: bool = False
    flops: Flops | None = None
    gradient_flops: Flops | None = None

    @property
    def may_scale(self) -> bool:
        """Whether it accepts scaled formats if one of its factors is a weight."""
        return bool(self.scaled) or self.contracts is not None

    def converted(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of the arguments converted to an adjustable operator's precision."""
        if self.alone is None or args[self.alone[1]] is not None:
            return self.operands
        return (*self.operands, self.alone[0])


def dependent(reason: str, names: str, *, moves: bool = False) -> tuple[OperatorRow, ...]:
    """Return dependent rows for the ATen operators in `names`, separated by spaces."""
    return _rows(Kind.DEPENDENT, reason, names, moves=moves)


def fixed(
    reason: str, names: str, *, loss: bool = False, converts: bool = False
) -> tuple[OperatorRow, ...]:
    """Return fixed rows for the ATen operators in `names`, separated by spaces."""
    return _rows(Kind.FIXED, reason, names, loss=loss, converts=converts)


def _rows(kind: Kind, reason: str, names: str, **facts: Any) -> tuple[OperatorRow, ...]:
    # The row of an overload has its operator's name: ids and plans do not name overloads.
    return tuple(
        OperatorRow(name.partition(".")[0], (f"aten::{name}",), kind, reason, **facts)
        for name in names.split()
    )
