"""What one operator is to the passes: a frozen, declarative row.

Invariant: a row states facts about an ATen operator and holds no state. Passes ask rows; they never name operators themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Flops = Callable[[tuple[Any, ...], Any], Any]
"""Maps (arguments with tensors in place of nodes, output tensor) to the floating-point operations of the forward, 2 a multiply-add.

Shapes may be symbolic; the result is then a `torch.SymInt`.
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
        targets: the ATen operators it stands for, without overload, such as "aten::linear".
        kind: who decides its precision.
        reason: why it is of that kind, in words a user understands.
        operands: adjustable only: positions of the tensor arguments that are converted to the precision. A position may hold None.
            Tensor arguments elsewhere (a norm's weight and statistics) keep their format.
        scaled: adjustable only: positions of (activation, weight) for operators that can take scaled formats (INT8, FP8);
            empty means float formats only: the paper leaves products of two activations, norms and softmax unquantized.
        output_only: adjustable only: converting the result gives the same values as converting the operands, and is
            cheaper (an embedding gathers few rows of a large table).
        products: whether it is made of matrix products, which formats like TF32 that exist only inside products apply to.
        flops: forward floating-point operations; None where they do not matter next to the bytes moved.
    """

    name: str
    targets: tuple[str, ...]
    kind: Kind
    reason: str
    operands: tuple[int, ...] = ()
    scaled: tuple[int, ...] = ()
    output_only: bool = False
    products: bool = False
    flops: Flops | None = None
