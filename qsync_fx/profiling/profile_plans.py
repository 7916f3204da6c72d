"""Under which plans a model runs so that its other plans can be foreseen.

An operator's time depends on its own state and on what its neighbours hand over. Uniform plans alone never show an INT8 product among
FP32 operators, nor an FP32 one among narrow ones. So products take each format in turn, and all else each float format.

Invariant: no two plans put all operators into the same states.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_fx.explanation import Explanation
from qsync_fx.graph import Operator
from qsync_fx.graph.reads import State
from qsync_fx.ops import Kind
from qsync_fx.plan import Plan
from qsync_fx.precision import Precision

States = tuple[tuple[str, State], ...]
"""Each operator's id, in program order, with its state."""


def profile_plans(explanation: Explanation, precisions: Sequence[Precision]) -> dict[str, tuple[Plan, States]]:
    """Returns the plans that a model is to be measured under, each by what it is in words and with the states that it makes."""
    found: dict[str, tuple[Plan, States]] = {}
    for fmt in precisions:
        add(found, str(fmt), Plan.uniform(fmt), explanation)
    chosen = [operator for operator in explanation.operators if operator.kind is Kind.ADJUSTABLE]
    for products in precisions:
        # A scaled format is one for products: what else is planned in it runs in another, which is measured by itself.
        for others in [fmt for fmt in precisions if not fmt.scaled] or [products]:
            plan = Plan(operators={op.id: products if _multiplies(op) else others for op in chosen})
            add(found, f"{products} products, {others} else", plan, explanation)
    return found


def add(found: dict[str, tuple[Plan, States]], label: str, plan: Plan, explanation: Explanation) -> None:
    """Adds a plan to others, unless one of them puts all operators into the same states."""
    states = tuple((str(op.id), State.of(op.note)) for op in explanation.replanned(plan).operators)
    if states not in [known for _, known in found.values()]:
        found[label] = plan, states


def _multiplies(operator: Operator) -> bool:
    return operator.row is not None and operator.row.products
