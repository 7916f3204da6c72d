"""In which format an operator reads each of its operands: the one answer for casts, the verifier, costs and the DAG.

Invariant: the answer follows from the operator's row and precision and from the types that the model was written in, not from casts that
are there already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.effects.writes import in_place
from qsync_fx.graph.nodes import arguments
from qsync_fx.graph.notes import Note
from qsync_fx.graph.values import format_of, is_float
from qsync_fx.ops import Kind, OperatorRow, Place
from qsync_fx.precision import Precision, precision_of, promoted


@dataclass(frozen=True)
class State:
    """What a plan makes of an operator.

    Attributes:
        precision: the format it computes in; None for an operator without floating-point results.
        output: the format of its result.
    """

    precision: Precision | None
    output: Precision | None

    @classmethod
    def of(cls, note: Note) -> State:
        return cls(note.precision, note.output)

    @functools.cached_property
    def names(self) -> tuple[str | None, str | None]:
        """Both by name."""
        return self.precision.name if self.precision else None, self.output.name if self.output else None


class Asks(Enum):
    """What an operator asks of an operand where it asks for no format."""

    WRITTEN = "as the model wrote it"
    BESIDE = (
        "as the model wrote it, widened where that is a narrow format other than the operator's: torch takes no two"
    )
    GIVEN = "as it is"


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator reads.

    Attributes:
        node: what it reads, as the model was written.
        position: of the argument in the operator's schema.
        role: the argument's name there, with the place in it where it is a list: "input", "mat2", "tensors.1"; a product's "weight".
        place: its position, or that and the place in it where it is a list.
    """

    node: fx.Node
    position: int
    role: str
    place: Place


@dataclass(frozen=True)
class Reader:
    """An operator that reads.

    Attributes:
        kind, row: what its note says.
        operands: what it reads, once for each time that it reads it; nothing where it holds a body, whose operators read.
        converted: positions of the operands that are in an adjustable operator's precision, beside factors.
        in_place: whether its result is what it writes to, whose format it has.
        made: the format of its result as the model was written.
    """

    kind: Kind
    row: OperatorRow | None
    operands: tuple[Operand, ...]
    converted: tuple[int, ...]
    in_place: bool
    made: Precision | None

    @classmethod
    def of(cls, node: fx.Node, note: Note, value: Any) -> Reader:
        """Returns an operator as it stands; `value`: its own, in the types that the model was written in."""
        row = note.row
        converted: tuple[int, ...] = ()
        if note.kind is Kind.ADJUSTABLE and row is not None:
            converted = row.converted(tuple(arguments(node).values()))
        own = () if meta.bodies(node) else operands(node, note)
        return cls(note.kind, row, own, converted, in_place(node), format_of(value))

    def takes_scaled(self, operand: Operand) -> bool:
        """Whether an operand is a factor of a product with a weight, which takes formats that are not plain."""
        return self.row is not None and operand.place in self.row.scaled

    def asks(self, precision: Precision | None, operand: Operand, value: Any) -> Precision | Asks:
        """Returns the format that an operator in `precision` asks for; `value`: the operand's fake value, of which only sizes count."""
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
        if self.kind is Kind.DEPENDENT:
            # Tensors without dimensions do not widen what they meet, and are not converted.
            return precision if value.dim() else Asks.GIVEN
        return Asks.WRITTEN if precision is self.made else precision

    def _adjustable(self, precision: Precision | None, operand: Operand) -> Precision | Asks:
        assert self.row is not None
        if precision is None or self.row.output_only:
            return Asks.WRITTEN
        if not precision.plain and self.takes_scaled(operand):
            return precision
        if precision.scaled:
            return Asks.WRITTEN
        # What is no factor is not rounded to a grid: it has the type that the grid's values are kept in.
        held = precision if precision.plain else precision_of(precision.dtype)
        return held if held is not None and operand.position in self.converted else Asks.BESIDE

    def read_as(self, precision: Precision | None, operand: Operand, value: Any) -> Precision | None:
        """Returns the format that an operator in `precision` reads an operand in; None where it takes whatever format that has.

        Args:
            value: the operand's fake value, in the type that the model was written in.
        """
        asked, own = self.asks(precision, operand, value), format_of(value)
        if isinstance(asked, Precision):
            return asked
        if asked is Asks.BESIDE and own is not None and own.bits < 32:
            assert precision is not None
            return own if own.dtype is precision.dtype else promoted(own, precision)
        return None if asked is Asks.GIVEN else own


def operands(node: fx.Node, note: Note | None) -> tuple[Operand, ...]:
    """Returns what an operator reads, once for each time that it reads it."""
    found: list[Operand] = []
    weight = note.row.scaled[1] if note is not None and note.row is not None and note.row.scaled else None

    def take(operand: Operand) -> fx.Node:
        role = "weight" if operand.place == weight else operand.role
        found.append(Operand(operand.node, operand.position, role, operand.place))
        return operand.node

    _mapped(node, take)
    return tuple(found)


def map_operands(node: fx.Node, change: Callable[[Operand], fx.Node]) -> None:
    """Puts `change(operand)` in the place of each operand."""
    node.args, node.kwargs = _mapped(node, change)


def _mapped(node: fx.Node, change: Callable[[Operand], fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with `change(operand)` in the place of each operand."""
    names: list[str] = []
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]

    def look(value: Any, position: int, role: str, place: Place) -> Any:
        if isinstance(value, fx.Node):
            return change(Operand(value, position, role, place))
        if isinstance(value, (list, tuple)):
            items = (look(item, position, f"{role}.{at}", (position, at)) for at, item in enumerate(value))
            return tuple(items) if isinstance(value, tuple) else list(items)
        if isinstance(value, dict):
            return {key: look(item, position, f"{role}.{key}", place) for key, item in value.items()}
        return value

    args = [
        look(value, at, names[at] if at < len(names) else f"argument{at}", at) for at, value in enumerate(node.args)
    ]
    positions = {name: names.index(name) if name in names else len(names) for name in node.kwargs}
    return tuple(args), {name: look(v, positions[name], name, positions[name]) for name, v in node.kwargs.items()}
