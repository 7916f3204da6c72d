"""The values of a model in a step: where they lie, how large they are, and who makes them.

Invariant: follows from the graph and the states of its operators alone; nothing is said of when.
"""

from __future__ import annotations

from qsync_fx.ops import table
from qsync_fx.precision import FORMATS
from qsync_fx.predictor.mapper import States
from qsync_fx.predictor.memory.telling import whole
from qsync_fx.predictor.model.value import Name, Operator


class Values:
    def __init__(self, states: States) -> None:
        self.states, self.graph = states, states.graph
        self._products = {row.name: row.added for row in table().values() if row.products}
        self._roots = [value.tensor for value in self.graph.values]
        same: dict[int, int] = {}
        for operator in self.graph.operators:
            if "dropout" in operator.row and not any(cost.saved for cost in operator.costs.values()):
                # Without a mask it gives back what it reads.
                tensor = self._roots[operator.reads[0].value]
                same[operator.result] = same.get(tensor, tensor)
        self._roots = [same.get(tensor, tensor) for tensor in self._roots]
        values = [self.graph.values[root] for root in self._roots]
        self._given = [value.source != "operator" for value in values]
        self._makers = [
            None if given or value.operator is None else self.graph.operators[value.operator]
            for value, given in zip(values, self._given, strict=True)
        ]

    def root(self, value: int) -> int:
        """Returns the place of the value whose memory a value lies in."""
        return self._roots[value]

    def bytes(self, value: int, fmt: Name) -> int:
        """Returns the bytes of a value in a format."""
        held = self.graph.values[value]
        floats = FORMATS[fmt].dtype.itemsize * whole(held.numel) if fmt is not None else 0
        return floats + whole(held.fixed)

    def multiplies(self, operator: Operator) -> bool:
        """Whether it is a product, which a kernel of a library computes."""
        return operator.row in self._products

    def multiplied(self, operator: Operator) -> tuple[int, int]:
        """Returns the places of the two readings that a product multiplies, whatever is added to it before or behind them."""
        added = self._products[operator.row]
        first, second = [place for place in range(2 + len(added)) if place not in added][:2]
        return first, second

    def other(self, operator: Operator, place: int) -> int:
        """Returns the place of the factor of a product of two with which the gradient of the one at a place is computed."""
        return sum(self.multiplied(operator)) - place

    def made_by(self, value: int) -> Operator | None:
        """Returns the operator that makes a value; None for what is there before the step."""
        return self._makers[value]

    def given(self, value: int) -> bool:
        """Whether a value is there before the step."""
        return self._given[value]

    def is_part(self, value: int) -> bool:
        """Whether it is a view of a part of a larger value, which a product reads from a copy."""
        whole_one = self.graph.values[self.root(value)]
        return not self.given(value) and whole(self.graph.values[value].numel) < whole(whole_one.numel)
