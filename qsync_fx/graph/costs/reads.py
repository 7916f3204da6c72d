"""In which format an operator reads each of its operands: the one answer for casts, the verifier, costs and the DAG.

Invariant: the answer follows from the operator's row and state and from the types that the model was written in, not from casts that are
there already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.notes import Note
from qsync_fx.graph.values import format_of, is_float
from qsync_fx.ops import Kind, Place
from qsync_fx.precision import Precision


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


def operands(node: fx.Node) -> list[Operand]:
    """Returns what an operator reads, once for each time that it reads it."""
    names = _names(node)
    found: list[Operand] = []
    note = meta.NOTE.get(node)
    weight = note.row.scaled[1] if note is not None and note.row is not None and note.row.scaled else None

    def look(value: Any, position: int, role: str, place: Place) -> None:
        if isinstance(value, fx.Node):
            found.append(Operand(value, position, "weight" if place == weight else role, place))
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                look(item, position, f"{role}.{at}", (position, at))
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, position, f"{role}.{key}", place)

    for at, value in enumerate(node.args):
        look(value, at, names[at] if at < len(names) else f"argument{at}", at)
    for name, value in node.kwargs.items():
        position = names.index(name) if name in names else len(names)
        look(value, position, name, position)
    return found


def _names(node: fx.Node) -> list[str]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [argument.name for argument in node.target._schema.arguments]


def read_as(note: Note, state: State, operand: Operand, value: Any) -> Precision | None:
    """Returns the format that an operator in `state` reads an operand in; None where it takes whatever format that has.

    Args:
        value: the operand's fake value, in the type that the model was written in.
    """
    own, row, precision = format_of(value), note.row, state.precision
    if own is None or precision is None or not is_float(value):
        return own
    if note.kind is Kind.ADJUSTABLE and row is not None:
        if row.output_only:
            return own
        if not precision.plain and operand.place in row.scaled:
            return precision
        if not precision.scaled and operand.position in row.operands:
            return precision
        return own
    if row is not None and row.converts:
        return None
    if note.kind is Kind.DEPENDENT:
        # Tensors without dimensions do not widen what they meet, and are not converted.
        return precision if value.dim() else None
    return own
