"""What a rewrite is told of a place that it has found.

Invariant: it describes the place as it was before anything was put in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsync_fx.graph import Operator, PrecisionGraph


@dataclass(frozen=True)
class Match:
    """A place that a rewrite has found.

    `match["x"]` is what the pattern's argument `x` stands for there: a fake tensor, which has a shape and a type but no values, or the
    value of an argument with a default.

    Attributes:
        graph: the graph, with device, options and plan in its `context`.
        operators: the operators that compute the pattern there, in the order that they run.
    """

    graph: PrecisionGraph
    operators: tuple[Operator, ...]
    _arguments: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self._arguments[argument]

    @property
    def main(self) -> Operator:
        """The last of the operators that belongs to a module; the last of all where none does. What is put in belongs there too."""
        return next((op for op in reversed(self.operators) if op.id.module), self.operators[-1])

    @property
    def module(self) -> str:
        """The path of the module that the place is in, as in a state_dict; "" outside any."""
        return self.main.id.module
