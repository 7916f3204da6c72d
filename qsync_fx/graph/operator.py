"""A handle on one operator of a graph.

Invariant: it keeps nothing. What it says it reads from the node's note, and what is decided by it stands there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import fx

from qsync_fx.devices import row_on, support
from qsync_fx.errors import PrecisionError
from qsync_fx.graph import meta
from qsync_fx.graph.nodes import Source, argument_at, arguments, source_of
from qsync_fx.graph.notes import Note
from qsync_fx.graph.values import format_of
from qsync_fx.ops import Kind, OperatorRow
from qsync_fx.plan.opid import OpId
from qsync_fx.precision import FP32, Precision, precision
from qsync_fx.resolve import resolve

if TYPE_CHECKING:
    from qsync_fx.graph.graph import PrecisionGraph


class Operator:
    """A handle on one operator of the graph; it reads and writes the node's note.

    Args:
        note: what the handle shows in place of the node's note: a decision that is another plan's.
    """

    def __init__(self, graph: PrecisionGraph, node: fx.Node, note: Note | None = None) -> None:
        self.graph, self.node, self._note = graph, node, note

    @property
    def note(self) -> Note:
        note: Note = self._note or meta.NOTE[self.node]
        return note

    @property
    def id(self) -> OpId:
        return self.note.id

    @property
    def kind(self) -> Kind:
        return self.note.kind

    @property
    def precision(self) -> Precision | None:
        return self.note.precision

    @property
    def output(self) -> Precision | None:
        return self.note.output

    @property
    def reason(self) -> str:
        by, reason = self.note.by, self.note.reason
        if self.note.computed is not None:
            reason = f"{reason}; {self.note.computed}" if reason else str(self.note.computed)
        return f"{self.note.how} by {by}; {reason}" if by and reason else reason

    @property
    def row(self) -> OperatorRow | None:
        return self.note.row

    @property
    def held(self) -> Precision | None:
        """The format that the model itself holds the result in; None in an autocast region that gives way to a plan."""
        region = isinstance(self.note.autocast, Precision) and not self.graph.context.automatic
        return None if region else format_of(self.graph.value(self.node))

    @property
    def refused(self) -> str | None:
        """Why no operator of ours takes the place of this one; None where one does, and for rows that never have one."""
        row = self.row
        if row is None or not row.scaled:
            return None
        given = tuple(arguments(self.node).values())
        if not all(isinstance(argument_at(given, at), fx.Node) for at in row.scaled):
            return "an operand is no tensor"
        lowering = self.graph.context.lowerings.get(row.name)
        return lowering.refuses(self.node) if lowering is not None else f"{row.name} has no lowering"

    @property
    def source(self) -> Source | None:
        return source_of(self.node)

    @property
    def where(self) -> str:
        """The operator's id and its line in the user's model, for error messages."""
        source = self.source
        return f"operator {self.id}" + (f", {source}: {source.code}" if source else "")

    def update(self, **changes: Any) -> None:
        """Replaces fields of the note."""
        note = self.note
        if any(getattr(note, name) != value for name, value in changes.items()):
            meta.NOTE[self.node] = dataclasses.replace(note, **changes)

    def assign(self, name: str | Precision, reason: str) -> None:
        """Gives the operator a precision, for a reason that reports show; it holds against the plan.

        Raises:
            PrecisionError: the precision is unknown, or the operator is not adjustable.
        """
        wanted = precision(name)
        if self.kind is not Kind.ADJUSTABLE:
            raise PrecisionError(
                f"{self.id} is {self.kind}: no pass can assign {wanted} to it",
                where=self.where,
                do='choose among graph.operators(kind="adjustable"); dependent operators follow their inputs',
            )
        self.decide(wanted, reason, pinned=True)

    def slower(self, fmt: Precision) -> str | None:
        """Why a wider format is as fast at the operator's shape on the device; None where it is not, or where nothing says so."""
        context = self.graph.context
        if (offered := support(context.device, fmt)).how == "simulated":
            return offered.reason
        # A product without a weight has no lowering that would know its shape.
        lowering = context.lowerings.get(self.row.name) if self.row is not None and self.row.scaled else None
        found: str | None = lowering.slower(self.node, fmt, context) if lowering is not None and fmt.bits < 32 else None
        return found

    def decide(self, planned: Precision, reason: str, pinned: bool = False, where_faster: bool = False) -> None:
        """Notes what is planned, what the operator and the device make of it, and why.

        Args:
            where_faster: whether a wider format is taken that is as fast.
        """
        row = self.row
        assert row is not None, "adjustable operators have rows"
        context = self.graph.context
        runs, but = resolve(row, planned, context.device, context.options.exact, self.held, self.refused)
        narrow = self.held if self.held is not None and self.held.bits < 32 else None
        while where_faster and runs is not narrow and (slower := self.slower(runs)) is not None:
            wider = narrow or (FP32 if runs.plain else row_on(context.device, runs).elsewhere)
            but = "; ".join(filter(None, (but, f"{slower}, so it runs in {wider}")))
            runs = wider
        reason = f"{reason}; {but}" if but else reason
        self.update(planned=planned, precision=runs, reason=reason, instead=but, pinned=pinned)

    def __repr__(self) -> str:
        return f"<Operator {self.id} {self.kind} {self.precision or 'unassigned'}>"
