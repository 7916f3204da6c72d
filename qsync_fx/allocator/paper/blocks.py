"""The parts of a model that are searched one by one: blocks that are equal to others, and what is in none of these.

Invariant: each unit is in one part. Parts have so few units that all of their plans can be tried: a block that has more is cut, and so is
what is in no block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.paper.units import Unit
from qsync_fx.predictor.isomorphism import isomorphic_blocks
from qsync_fx.predictor.model.value import ModelGraph

TRIED: Final = 3**7
"""How many plans of a part are tried at most."""


@dataclass(frozen=True)
class Parts:
    """Equal parts of a model.

    Attributes:
        units: of each part, in order; those at one place get one format.
    """

    units: tuple[tuple[Unit, ...], ...]

    @property
    def first(self) -> tuple[Unit, ...]:
        """The units of the part that is searched for all."""
        return self.units[0]


def parts(graph: ModelGraph, units: Sequence[Unit]) -> tuple[Parts, ...]:
    """Returns the parts of a model, equal ones together."""
    alone = {unit.operators[0]: unit for unit in units if len(unit.operators) == 1}
    found: list[Parts] = []
    taken: set[Unit] = set()
    for equal in isomorphic_blocks(graph):
        blocks = [tuple(alone[op] for op in block if op in alone) for block in equal.operators]
        # Operators that are tied belong to no block alone, and equal blocks then differ in what is left of them.
        if blocks[0] and len({tuple(unit.formats for unit in block) for block in blocks}) == 1:
            found += [Parts(tuple(block[cut] for block in blocks)) for cut in _cuts(blocks[0])]
            taken.update(unit for block in blocks for unit in block)
    rest = [unit for unit in units if unit not in taken]
    return (*found, *(Parts((tuple(rest[cut]),)) for cut in _cuts(rest)))


def _cuts(units: Sequence[Unit]) -> list[slice]:
    """Returns what units are cut into, each as long as can be tried."""
    found, start = [], 0
    for at in range(1, len(units) + 1):
        if at == len(units) or math.prod(len(unit.formats) for unit in units[start : at + 1]) > TRIED:
            found.append(slice(start, at))
            start = at
    return found
