"""What is kept for the backward pass, as a linear expression: each value in each format once, whoever keeps it.

Invariant: at whole choices it is what `States.saved` adds up to, beyond what is there whatever the plan.
"""

from __future__ import annotations

from qsync_fx.allocator.exact.formats import Formats
from qsync_fx.allocator.exact.program import Expression, Program, total
from qsync_fx.graph.algebra import Kept
from qsync_fx.predictor.memory.forward import whole


def kept_bytes(program: Program, formats: Formats) -> Expression:
    """Returns the bytes that are kept."""
    keepers: dict[tuple[Kept, int], list[Expression]] = {}
    for operator, states in zip(formats.graph.operators, formats.states, strict=True):
        own: dict[tuple[Kept, int], dict[int, float]] = {}
        for names, where in states.items():
            for kept, size in operator.costs[names].saved.items():
                key = kept, whole(size)
                own[key] = total((1.0, own.get(key, {})), (1.0, where))
        for key, expression in own.items():
            keepers.setdefault(key, []).append(expression)
    return total(*((float(size), program.any_of(wants)) for (_, size), wants in keepers.items()))
