"""What a user's pass has put into a graph becomes part of it.

Invariant: afterwards each new node has a value, and each new operator an id, a kind, a reason and a line, as if it had been there when the
passes ran that have run already. What they can decide no more says so: a plan is applied once, and casts are inserted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from qsync_fx.errors import PassError
from qsync_fx.graph import Operator, PrecisionGraph, meta
from qsync_fx.graph.charging import charge
from qsync_fx.graph.copies import copied
from qsync_fx.graph.values import format_of
from qsync_fx.ops import Kind
from qsync_fx.passes.annotate_cost import AnnotateCost
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.cascade import Cascade
from qsync_fx.passes.classify import Classify, classify
from qsync_fx.passes.custom.spelling import evaluate, spell
from qsync_fx.passes.custom.watch import Seen, replaced
from qsync_fx.passes.insert_casts import InsertCasts
from qsync_fx.passes.lower import Lower
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.rewriting.inline import OF_THE_MODEL
from qsync_fx.passes.tracing.identity import identify_new, mark
from qsync_fx.precision import Precision


def take_in(graph: PrecisionGraph, before: Seen, by: str, passed: Sequence[str]) -> None:
    """Makes what the pass called `by` has put in part of a graph, after the passes named in `passed`.

    Raises:
        PassError: a node computes nothing: its operator does not take what it is given, or is none.
    """
    parts = list(graph.walk())
    if Normalize.name not in passed:
        for part in parts:
            for node in _new(part, before):
                mark(node, by)
        return
    for part in parts:
        try:
            for node in _new(part, before):
                spell(part, node)
            for node in _new(part, before):
                evaluate(part, node, before)
        except PassError as error:
            error.where = f"pass {by!r}, {error.where}"
            raise
        part.module.recompile()
    alive = {node for part in parts for node in part.nodes}
    free = {old: [old] for old in before.notes if old not in alive}
    for part in parts:
        _identify(part, before, free, by)
    operators = [operator for operator in graph.operators() if operator.node not in before.notes]
    for operator in operators:
        _decide(operator, passed)
    for part in parts if Lower.name in passed else ():
        charge(part)
    if not operators:
        return
    if Classify.name in passed and InsertCasts.name not in passed:
        graph.written = copied(graph)
        graph.__dict__.pop("costing", None)
        if Cascade.name in passed:
            Cascade()(graph)
    if AnnotateCost.name in passed:
        AnnotateCost()(graph)


def _new(graph: PrecisionGraph, before: Seen) -> list[fx.Node]:
    return [node for node in graph.nodes if node not in before.nodes]


def _identify(graph: PrecisionGraph, before: Seen, free: dict[fx.Node, list[fx.Node]], by: str) -> None:
    copied_from = {id(note): node for node, note in before.notes.items()}
    instead = replaced(before, graph)
    for node in _new(graph, before):
        if node in meta.NOTE and id(meta.NOTE[node]) not in copied_from:
            continue  # a rewrite has said what it is
        origin = copied_from.get(id(meta.NOTE.get(node)))
        del meta.NOTE[node]
        old = origin if origin in free else _place_of(node, instead, before)
        near = old if old in before.notes else _neighbour(graph, node)
        for key in OF_THE_MODEL:
            if near is not None and key in near.meta:
                node.meta.setdefault(key, near.meta[key])
        note = meta.NOTE[near] if near is not None else None
        identify_new(graph, [node], by, "inserted", note, free.get(old, []) if old is not None else [])


def _place_of(node: fx.Node, instead: dict[fx.Node, fx.Node], before: Seen) -> fx.Node | None:
    """The node of the model in whose place a new one stands, together with others of its pass that read it."""
    todo = [node]
    for at in todo:
        if at in instead:
            return instead[at]
        todo += [user for user in at.users if user not in before.nodes and user not in todo]
    return None


def _neighbour(graph: PrecisionGraph, node: fx.Node) -> fx.Node | None:
    """The operator that a node belongs beside: one of the module that its pass says, else one that it reads, else one that reads it."""
    if stack := node.meta.get("nn_module_stack"):
        for operator in graph.own_operators():
            if (other := operator.node.meta.get("nn_module_stack")) and list(other)[-1] == list(stack)[-1]:
                return operator.node
    return _nearest(node, lambda at: at.all_input_nodes) or _nearest(node, lambda at: at.users)


def _nearest(node: fx.Node, beside: Callable[[fx.Node], Iterable[fx.Node]]) -> fx.Node | None:
    todo = [node]
    for at in todo:
        if at is not node and at in meta.NOTE:
            return at
        todo += [other for other in beside(at) if other not in todo]
    return None


def _decide(operator: Operator, passed: Sequence[str]) -> None:
    """Says of a new operator what the passes that have run say of the others."""
    note, own = operator.note, format_of(operator.graph.value(operator.node))
    replaces = note.precision is not None
    if InsertCasts.name in passed:
        lowered = Lower.name in passed and note.precision is not None and not note.precision.plain
        if not replaces:
            operator.update(kind=Kind.FIXED, precision=own, output=own, autocast=None, reason=_settled(own))
        elif (lowered and str(note.precision) not in operator.node.args) or (not lowered and own is not note.output):
            why = f"{note.precision} gives way: {_settled(own)}"
            operator.update(precision=own, output=own, instead=why, reason=f"{note.reason}; {why}")
    elif Classify.name in passed and not replaces:
        classify(operator)
        if Assign.name in passed and operator.kind is Kind.ADJUSTABLE:
            why = (
                f"it was put in after {Assign.name!r} had applied the plan, so it stays in {own}: let the pass run before for the plan to "
                "decide"
            )
            operator.update(kind=Kind.FIXED, autocast=None, reason=why)


def _settled(own: Precision | None) -> str:
    computes = f", so it computes in what it reads, {own}" if own is not None else ""
    return f"it was put in after {InsertCasts.name!r} had settled formats{computes}"
