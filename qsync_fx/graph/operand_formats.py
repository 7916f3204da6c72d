"""Formats in which operators read their operands, and the weights of products.

Casts, the verifier and costs use the same answer, which follows from the operator's row and
precision and from the model's dtypes. A weight is a parameter, moved or converted at most; a
row from `with_weight` has `scaled` if exactly one factor of a layer's product is a weight.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
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
from qsync_fx.torch_internals import OpOverload


class Origin(enum.Enum):
    """Origin of a value. HELD: a buffer, or computed from parameters and buffers alone."""

    PARAMETER = 1
    HELD = 2
    ACTIVATION = 3


class Origins:
    """Origins of the values of a graph and its bodies, computed once."""

    def __init__(self, graph: PrecisionGraph) -> None:
        self._cache: dict[fx.Node, Origin] = {}
        self._walk(graph.top_level)

    def of(self, node: Any) -> Origin:
        return self._cache.get(node, Origin.HELD)

    def _walk(self, graph: PrecisionGraph) -> None:
        for node in graph.nodes:
            self._cache.setdefault(node, self._find(graph, node))
            for body in node_metadata.bodies(node):
                self._cache |= {
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
        moves = function_name(node) == "getitem" or (row and (row.moves or row.converts))
        if isinstance(moved, fx.Node) and moves:
            return self.of(moved)
        if row is not None and row.output_only:
            return Origin.ACTIVATION  # a lookup in a table
        read = [used for used in node.all_input_nodes if tensors(graph.value(used))]
        read = [used for used in read if any(map(is_float, tensors(graph.value(used))))] or read
        activation = any(self.of(used) is Origin.ACTIVATION for used in read)
        return Origin.ACTIVATION if activation else Origin.HELD


def with_weight(
    graph: PrecisionGraph, node: fx.Node, row: OperatorRow, origins: Origins
) -> OperatorRow:
    """Return a product's row, completed with the factors of this call."""
    if row.contracts is None:
        return row
    inputs = list(arguments(node).values())
    result = row.contracts([fx.node.map_arg(argument, graph.value) for argument in inputs])
    if isinstance(result, str):
        factors = [inputs[index] for index in row.operands if index not in row.added]
        return _unscaled(row, [origins.of(used) for used in nodes_in(factors)], result)
    factors = [origins.of(argument_at(inputs, place)) for place in result.places]
    weights = [index for index, origin in enumerate(factors) if origin is Origin.PARAMETER]
    if row.scaled and (len(weights) != 1 or result.unfit(weights[0])):
        # The weight argument of a layer is the weight, however it is computed, unless only the
        # other factor is a parameter.
        weights = [result.places.index(row.scaled[1])]
    if len(weights) != 1:
        return _unscaled(row, factors)
    if why := result.unfit(weights[0]):
        return _unscaled(row, factors, why)
    scaled = result.places[1 - weights[0]], result.places[weights[0]]
    return dataclasses.replace(row, scaled=scaled, reason=WEIGHT)


def _unscaled(row: OperatorRow, factors: list[Origin], why: str = "") -> OperatorRow:
    """Return the row of a product that accepts float formats only."""
    parameters = factors.count(Origin.PARAMETER)
    reason = ODD
    if parameters == len(factors):
        reason, why = PARAMETERS, "both of its factors are parameters"
    elif not parameters and Origin.HELD not in factors:
        return row
    elif not parameters:
        reason, why = HELD, "the factor that is no activation is no parameter"
    return dataclasses.replace(row, scaled=(), reason=reason, unscaled=why)


@dataclass(frozen=True)
class OperandState:
    """Compute and result format of an operator under a plan; None without floating-point result."""

    precision: Precision | None
    output: Precision | None

    @classmethod
    def of(cls, note: OperatorInfo) -> OperandState:
        return cls(note.precision, note.output)

    @functools.cached_property
    def names(self) -> tuple[str | None, str | None]:
        return getattr(self.precision, "name", None), getattr(self.output, "name", None)


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator reads.

    `role` is the argument's name in the schema, "input", with an index for list items, "tensors.1";
    it is "weight" for a product's weight. `place` is the position, or (position, index).
    """

    node: fx.Node
    position: int
    role: str
    place: Place


@dataclass(frozen=True)
class OperandReader:
    """An operator as a reader of its operands.

    Attributes:
        operands: one entry per read; empty for an operator with a body, whose operators read.
        converted: positions of the operands that an adjustable operator reads in its precision,
            besides factors.
        in_place: whether the result is the tensor that it writes to.
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
        converted: tuple[int, ...] = ()
        if note.kind is Kind.ADJUSTABLE and note.row is not None:
            converted = note.row.converted(tuple(arguments(node).values()))
        read = () if node_metadata.bodies(node) else operands(node, note)
        return cls(note.kind, note.row, read, converted, in_place(node), format_of(value))

    def read_as(
        self, precision: Precision | None, operand: Operand, value: Any
    ) -> Precision | None:
        """Return the format that an operator in `precision` reads an operand in; None for any."""
        owned = format_of(value)
        if not is_float(value) or owned is None:
            return None
        if self.kind is Kind.ADJUSTABLE and self.row is not None:
            return self._adjustable(self.row, precision, operand, owned)
        if not self.in_place and self.row is not None and self.row.converts:
            return None
        if precision is None:
            return owned
        if self.in_place:
            return precision
        if self.kind is not Kind.DEPENDENT:
            return owned if precision is self.made else precision
        # Zero-dimensional tensors do not widen other operands, and are not converted.
        return precision if value.dim() else None

    def _adjustable(
        self, row: OperatorRow, precision: Precision | None, operand: Operand, owned: Precision
    ) -> Precision:
        if precision is None or row.output_only:
            return owned
        if not precision.plain and operand.place in row.scaled:
            return precision
        if precision.scaled:
            return owned
        if operand.position in self.converted:
            # An operand that is not a factor is not rounded to the grid: it gets the grid's storage
            # dtype.
            stored = precision if precision.plain else precision_of(precision.dtype)
            if stored is not None:
                return stored
        # torch accepts only one narrow format.
        narrow = owned.bits < 32 and owned.dtype is not precision.dtype
        return promoted(owned, precision) if narrow else owned


def operands(node: fx.Node, note: OperatorInfo | None) -> tuple[Operand, ...]:
    """Return an operator's operands, one entry per read."""
    result: list[Operand] = []
    weights = note.row.scaled[1:] if note is not None and note.row is not None else ()

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
    if isinstance(node.target, OpOverload):
        positions = {a.name: index for index, a in enumerate(node.target._schema.arguments)}
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

    args, kwargs = [], {}
    for index, value in enumerate(node.args):
        args.append(look(value, index, names.get(index, f"argument{index}"), index))
    for name, value in node.kwargs.items():
        index = positions.get(name, len(positions))
        kwargs[name] = look(value, index, name, index)
    return tuple(args), kwargs
