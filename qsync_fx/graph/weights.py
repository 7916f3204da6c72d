"""Which factor of a product is a weight: a parameter of the model, or what only moves or converts one's values.

Invariant: the row that is returned has `scaled` where one factor is a weight and the product is one that a layer computes; elsewhere it
says what the factors are, or what the product is, so that the reason is true.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.effects.bodies import operands
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.nodes import argument_at, arguments, nodes_in
from qsync_fx.graph.values import is_float, tensors
from qsync_fx.ops import OperatorRow, row_for
from qsync_fx.ops.multiplying.products import HELD, ODD, PARAMETERS, WEIGHT


class Origin(enum.Enum):
    """Where a value comes from. HELD: from what the model holds alone, changed on the way, or from a buffer."""

    PARAMETER = 1
    HELD = 2
    ACTIVATION = 3


class Origins:
    """The origins of the values of a graph; its nodes are asked for in any order, and each is looked at once."""

    def __init__(self, graph: PrecisionGraph) -> None:
        self._known: dict[fx.Node, Origin] = {}
        self._walk(graph.whole)

    def of(self, node: Any) -> Origin:
        return self._known.get(node, Origin.HELD)

    def _walk(self, graph: PrecisionGraph) -> None:
        for node in graph.nodes:
            self._known.setdefault(node, self._find(graph, node))
            for body in meta.bodies(node):
                self._known |= {p: self.of(given) for p, given in operands(node, body) if isinstance(given, fx.Node)}
                self._walk(body)

    def _find(self, graph: PrecisionGraph, node: fx.Node) -> Origin:
        value = graph.value(node)
        if node.op == "placeholder":
            if isinstance(value, torch.nn.Parameter):
                return Origin.PARAMETER
            return Origin.HELD if meta.PATH.get(node) else Origin.ACTIVATION
        row = row_for(node.target)
        moved = node.args[0] if node.args else None
        unpacks = getattr(node.target, "__name__", "") == "getitem"
        if isinstance(moved, fx.Node) and (unpacks or (row is not None and (row.moves or row.converts))):
            return self.of(moved)
        if row is not None and row.output_only:
            return Origin.ACTIVATION  # what is looked up in a table
        read = [used for used in node.all_input_nodes if tensors(graph.value(used))]
        read = [used for used in read if any(map(is_float, tensors(graph.value(used))))] or read
        return Origin.ACTIVATION if any(self.of(used) is Origin.ACTIVATION for used in read) else Origin.HELD


def with_weight(graph: PrecisionGraph, node: fx.Node, row: OperatorRow, origins: Origins) -> OperatorRow:
    """Returns a product's row, with what is known of its factors in this call."""
    if row.contracts is None:
        return row
    given = list(arguments(node).values())
    found = row.contracts([fx.node.map_arg(argument, graph.value) for argument in given])
    if isinstance(found, str):
        every = [origins.of(used) for at in row.operands for used in nodes_in(given[at]) if at not in row.added]
        return _named(row, every, found)
    factors = [origins.of(argument_at(given, place)) for place in found.places]
    weights = [at for at, origin in enumerate(factors) if origin is Origin.PARAMETER]
    if row.scaled:
        # Written as a layer: what stands in the weight's place is one, however it is computed, unless the other factor clearly is.
        declared = found.places.index(row.scaled[1])
        weights = weights if len(weights) == 1 and not found.unfit(weights[0]) else [declared]
    if len(weights) != 1:
        return _named(row, factors)
    why = found.unfit(weights[0])
    if why:
        return _named(row, factors, why)
    scaled = found.places[1 - weights[0]], found.places[weights[0]]
    return dataclasses.replace(row, scaled=scaled, reason=WEIGHT)


def _named(row: OperatorRow, factors: list[Origin], why: str = "") -> OperatorRow:
    """The row of a product that takes float formats only."""
    parameters = factors.count(Origin.PARAMETER)
    if Origin.ACTIVATION not in factors and parameters == len(factors):
        return dataclasses.replace(row, scaled=(), reason=PARAMETERS, unscaled="both of its factors are parameters")
    if not parameters and Origin.HELD in factors:
        return dataclasses.replace(
            row, scaled=(), reason=HELD, unscaled="the factor that is no activation is no parameter"
        )
    if parameters:
        return dataclasses.replace(row, scaled=(), reason=ODD, unscaled=why)
    return row
