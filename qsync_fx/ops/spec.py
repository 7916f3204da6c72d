"""What one operator is to the passes: a frozen, declarative row.

Invariant: a row states facts about an ATen operator and holds no state. Passes ask rows; they never name operators
themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsync_fx.ops.contractions import Contraction

Place = int | tuple[int, int]
"""Where an operand stands: the position of an argument, or that and the place in it where it is a list."""

Flops = Callable[[tuple[Any, ...], Any], Any]
"""Maps (arguments with tensors in place of nodes, output tensor) to the forward's floating-point operations.

A multiply-add counts 2. Shapes may be symbolic; the result is then a `torch.SymInt`.
"""


class Kind(enum.StrEnum):
    """Who decides an operator's precision (paper, section IV-B).

    ADJUSTABLE: the plan. DEPENDENT: its inputs, promoted. FIXED: nobody, it stays as the model wrote it.
    """

    ADJUSTABLE = "adjustable"
    DEPENDENT = "dependent"
    FIXED = "fixed"


@dataclass(frozen=True)
class OperatorRow:
    """One operator.

    Attributes:
        name: the operator's name in ids, plans and reports, such as "linear".
        targets: the ATen operators it stands for, such as "aten::linear". They are named without overload, save where
            one overload differs from its operator, as "aten::view.dtype" does, which reads bits as another type.
        kind: who decides its precision.
        reason: why it is of that kind, in words a user understands.
        operands: adjustable only: positions of the tensor arguments that are converted to the precision. A position may
            hold None, a list of tensors (`einsum`), or a mask of truth values (attention), which is not converted.
            Tensor arguments elsewhere (a norm's weight and statistics) keep their format.
        scaled: adjustable only: places of (activation, weight) for operators that can take scaled formats (INT8,
            FP8); empty means float formats only: the paper leaves products of two activations, norms and softmax
            unquantized.
        contracts: products of two factors that need not be an activation and a weight: maps arguments, with tensors in place of nodes, to
            what is contracted, or to the reason why that is no layer's product. `classify` finds the weight and fills in `scaled`.
        unscaled: why it takes no scaled format, where it is not that neither of its factors is a weight.
        output_only: adjustable only: converting the result gives the same values as converting the operands, and is
            cheaper (an embedding gathers few rows of a large table).
        alone: adjustable only: (position, position of its partner): where the partner is None it is an operand like the others.
        products: whether it is made of matrix products: formats like TF32 exist only inside products.
        writes: positions of arguments that it may write to without a word of it in its schema (a batch norm's statistics).
        added: products only: positions of operands that are added to the product and not multiplied: a bias, a mask.
        moves: its result has the values of its first argument, or some of them, in places that do not depend on values.
        converts: it is a conversion that the model itself asks for: it takes any format and gives the one it names.
        loss: fixed only: it is a loss, or what feeds one, and reads nothing that was made narrower for it.
        flops: forward floating-point operations; None where they do not matter next to the bytes moved.
        gradient_flops: those of all gradients together, of a product whose gradients are not as dear as itself, each.
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
        """Whether it takes scaled formats where one of its factors is a weight."""
        return bool(self.scaled) or self.contracts is not None

    def converted(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns the positions of the arguments that are converted to an adjustable operator's precision."""
        if self.alone is None or args[self.alone[1]] is not None:
            return self.operands
        return (*self.operands, self.alone[0])


def dependent(reason: str, names: str) -> tuple[OperatorRow, ...]:
    """Returns a row for each of `names`, ATen operators parted by spaces, whose precision their inputs decide."""
    return _rows(Kind.DEPENDENT, reason, names)


def fixed(reason: str, names: str, *, loss: bool = False) -> tuple[OperatorRow, ...]:
    """Returns a row for each of `names`, ATen operators parted by spaces, that stay as the model wrote them."""
    return _rows(Kind.FIXED, reason, names, loss)


def _rows(kind: Kind, reason: str, names: str, loss: bool = False) -> tuple[OperatorRow, ...]:
    # The row of one overload carries the name of its operator: ids and plans know no overloads.
    return tuple(
        OperatorRow(name.partition(".")[0], (f"aten::{name}",), kind, reason, loss=loss)
        for name in names.split()
    )
