"""Formats in which operators read their operands, and the weights of products.

Casts, the verifier, costs and the DAG use the same answer, which follows from the operator's row
and precision and from the model's dtypes. A weight is a parameter, moved or converted at most; a
row from `with_weight` has `scaled` if exactly one factor of a layer's product is a weight.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from qsync_fx.formats import Precision, precision_of, promoted
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import in_place, operands as aliased_operands
from qsync_fx.graph.fx_utils import (
    argument_at,
    arguments,
    format_of,
    function_name,
    is_float,
    nodes_in,
    tensors,
)
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.ops import row_for
from qsync_fx.ops.matmul import HELD, ODD, PARAMETERS, WEIGHT
from qsync_fx.ops.spec import Kind, OperatorRow, Place


class Origin(enum.Enum):
    """Origin of a value. HELD: a buffer, or computed from parameters and buffers alone."""

    PARAMETER = 1
    HELD = 2
    ACTIVATION = 3


class Origins:
    """Origins of the values of a graph and its bodies, computed once."""

    def __init__(self, graph: PrecisionGraph) -> None:
        self._known: dict[fx.Node, Origin] = {}
        self._walk(graph.whole)

    def of(self, node: Any) -> Origin:
        return self._known.get(node, Origin.HELD)

    def _walk(self, graph: PrecisionGraph) -> None:
        for node in graph.nodes:
            self._known.setdefault(node, self._find(graph, node))
            for body in node_metadata.bodies(node):
                self._known |= {
                    p: self.of(value)
                    for p, value in aliased_operands(node, body)
                    if isinstance(value, fx.Node)
                }
                self._walk(body)

    def _find(self, graph: PrecisionGraph, node: fx.Node) -> Origin:
        value = graph.value(node)
        if node.op == "placeholder" and isinstance(value, torch.nn.Parameter):
            return Origin.PARAMETER
        if node.op == "placeholder":
            return Origin.HELD if node_metadata.PATH.get(node) else Origin.ACTIVATION
        row, moved = row_for(node.target), next(iter(node.args), None)
        moves = function_name(node) == "getitem" or (
            row is not None and (row.moves or row.converts)
        )
        if isinstance(moved, fx.Node) and moves:
            return self.of(moved)
        if row is not None and row.output_only:
            return Origin.ACTIVATION  # a lookup in a table
        read = [used for used in node.all_input_nodes if tensors(graph.value(used))]
        read = [used for used in read if any(map(is_float, tensors(graph.value(used))))] or read
        if any(self.of(used) is Origin.ACTIVATION for used in read):
            return Origin.ACTIVATION
        return Origin.HELD


def with_weight(
    graph: PrecisionGraph, node: fx.Node, row: OperatorRow, origins: Origins
) -> OperatorRow:
    """Return a product's row, completed with the factors of this call."""
    if row.contracts is None:
        return row
    inputs = list(arguments(node).values())
    result = row.contracts([fx.node.map_arg(argument, graph.value) for argument in inputs])
    if isinstance(result, str):
        every = [
            origins.of(used)
            for index in row.operands
            for used in nodes_in(inputs[index])
            if index not in row.added
        ]
        return _named(row, every, result)
    factors = [origins.of(argument_at(inputs, place)) for place in result.places]
    weights = [index for index, origin in enumerate(factors) if origin is Origin.PARAMETER]
    if row.scaled and (len(weights) != 1 or result.unfit(weights[0])):
        # The weight argument of a layer is the weight, however it is computed, unless only the
        # other factor is a parameter.
        weights = [result.places.index(row.scaled[1])]
    if len(weights) != 1:
        return _named(row, factors)
    why = result.unfit(weights[0])
    if why:
        return _named(row, factors, why)
    scaled = result.places[1 - weights[0]], result.places[weights[0]]
    return dataclasses.replace(row, scaled=scaled, reason=WEIGHT)


def _named(row: OperatorRow, factors: list[Origin], why: str = "") -> OperatorRow:
    """Return the row of a product that accepts float formats only."""
    parameters = factors.count(Origin.PARAMETER)
    if Origin.ACTIVATION not in factors and parameters == len(factors):
        return dataclasses.replace(
            row, scaled=(), reason=PARAMETERS, unscaled="both of its factors are parameters"
        )
    if not parameters and Origin.HELD in factors:
        return dataclasses.replace(
            row, scaled=(), reason=HELD, unscaled="the factor that is no activation is no parameter"
        )
    if parameters:
        return dataclasses.replace(row, scaled=(), reason=ODD, unscaled=why)
    return row


@dataclass(frozen=True)
class OperandState:
    """State of an operator under a plan.

    Attributes:
        precision: the compute format; None for an operator without floating-point results.
        output: the format of its result.
    """

    precision: Precision | None
    output: Precision | None

    @classmethod
    def of(cls, note: OperatorInfo) -> OperandState:
        return cls(note.precision, note.output)

    @functools.cached_property
    def names(self) -> tuple[str | None, str | None]:
        return (
            self.precision.name if self.precision else None,
            self.output.name if self.output else None,
        )


class Asks(Enum):
    """Requirement of an operator that requires no fixed format of an operand."""

    WRITTEN = "the model's format"
    BESIDE = (
        "the model's format, widened if it is a narrow format other than the operator's, because "
        "torch accepts only one"
    )
    GIVEN = "any format"


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator reads.

    Attributes:
        node: the operand's node, in the model's graph.
        position: position of the argument in the operator's schema.
        role: the argument's name in the schema, with an index for list items: "input", "mat2",
            "tensors.1"; "weight" for a product's weight.
        place: the position, or (position, index) for list items.
    """

    node: fx.Node
    position: int
    role: str
    place: Place


@dataclass(frozen=True)
class OperandReader:
    """An operator as a reader of its operands.

    Attributes:
        kind, row: from its note.
        operands: one entry per read; empty for an operator with a body, whose operators read.
        converted: positions of the operands that an adjustable operator reads in its precision,
            besides factors.
        in_place: whether the result is the tensor that it writes to.
        made: the model's format of the result.
    """

    kind: Kind
    row: OperatorRow | None
    operands: tuple[Operand, ...]
    converted: tuple[int, ...]
    in_place: bool
    made: Precision | None

    @classmethod
    def of(cls, node: fx.Node, note: OperatorInfo, value: Any) -> OperandReader:
        """Return the reader for a node; `value` is its value in the model's dtype."""
        row = note.row
        converted: tuple[int, ...] = ()
        if note.kind is Kind.ADJUSTABLE and row is not None:
            converted = row.converted(tuple(arguments(node).values()))
        read: tuple[Operand, ...] = ()
        if not node_metadata.bodies(node):
            read = operands(node, note)
        return cls(note.kind, row, read, converted, in_place(node), format_of(value))

    def takes_scaled(self, operand: Operand) -> bool:
        """Return whether an operand is a factor that may be in a format that is not plain."""
        return self.row is not None and operand.place in self.row.scaled

    def asks(self, precision: Precision | None, operand: Operand, value: Any) -> Precision | Asks:
        """Return the format that an operator in `precision` requires of an operand.

        Args:
            value: the operand's fake value; only its sizes matter.
        """
        if not is_float(value):
            return Asks.GIVEN
        if self.kind is Kind.ADJUSTABLE and self.row is not None:
            return self._adjustable(precision, operand)
        if not self.in_place and self.row is not None and self.row.converts:
            return Asks.GIVEN
        if precision is None:
            return Asks.WRITTEN
        if self.in_place:
            return precision
        if self.kind is Kind.DEPENDENT and not value.dim():
            # Zero-dimensional tensors do not widen other operands, and are not converted.
            return Asks.GIVEN
        if self.kind is not Kind.DEPENDENT and precision is self.made:
            return Asks.WRITTEN
        return precision

    def _adjustable(self, precision: Precision | None, operand: Operand) -> Precision | Asks:
        assert self.row is not None
        if precision is None or self.row.output_only:
            return Asks.WRITTEN
        if not precision.plain and self.takes_scaled(operand):
            return precision
        if precision.scaled:
            return Asks.WRITTEN
        if operand.position not in self.converted:
            return Asks.BESIDE
        if precision.plain:
            return precision
        # An operand that is not a factor is not rounded to the grid: it gets the grid's storage
        # dtype.
        return precision_of(precision.dtype) or Asks.BESIDE

    def read_as(
        self, precision: Precision | None, operand: Operand, value: Any
    ) -> Precision | None:
        """Return the format that an operator in `precision` reads an operand in; None for any.

        Args:
            value: the operand's fake value in the model's dtype.
        """
        requested, owned = self.asks(precision, operand, value), format_of(value)
        if isinstance(requested, Precision):
            return requested
        if requested is Asks.BESIDE and owned is not None and owned.bits < 32:
            assert precision is not None
            if owned.dtype is not precision.dtype:
                return promoted(owned, precision)
        if requested is Asks.GIVEN:
            return None
        return owned


def operands(node: fx.Node, note: OperatorInfo | None) -> tuple[Operand, ...]:
    """Return an operator's operands, one entry per read."""
    result: list[Operand] = []
    weights: tuple[Place, ...] = ()
    if note is not None and note.row is not None:
        weights = note.row.scaled[1:]

    def take(operand: Operand) -> fx.Node:
        if operand.place in weights:
            operand = dataclasses.replace(operand, role="weight")
        result.append(operand)
        return operand.node

    _mapped(node, take)
    return tuple(result)


def map_operands(node: fx.Node, change: Callable[[Operand], fx.Node]) -> None:
    """Replace each operand by `change(operand)`."""
    node.args, node.kwargs = _mapped(node, change)


def _mapped(
    node: fx.Node, change: Callable[[Operand], fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions: dict[str, int] = {}
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        positions = {argument.name: index for index, argument in enumerate(arguments)}
    names = dict(enumerate(positions))

    def look(value: Any, position: int, role: str, place: Place) -> Any:
        if isinstance(value, fx.Node):
            return change(Operand(value, position, role, place))
        if isinstance(value, (list, tuple)):
            items = [
                look(item, position, f"{role}.{index}", (position, index))
                for index, item in enumerate(value)
            ]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {
                key: look(item, position, f"{role}.{key}", place) for key, item in value.items()
            }
        return value

    args = tuple(
        look(value, index, names.get(index, f"argument{index}"), index)
        for index, value in enumerate(node.args)
    )
    kwargs = {}
    for name, value in node.kwargs.items():
        index = positions.get(name, len(positions))
        kwargs[name] = look(value, index, name, index)
    return args, kwargs
