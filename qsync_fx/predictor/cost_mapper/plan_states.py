"""Operator states and casts of a model under a plan, predicted from a `ModelGraph`.

Invariant: the result equals `explanation.replanned(plan)`: the same precisions and outputs, and the
same casts, charged to the same operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from qsync_fx.errors import PlanError, nearest
from qsync_fx.formats import FORMATS
from qsync_fx.graph.cascade_rules import wants_wide
from qsync_fx.graph.cost_algebra import Kept, Size
from qsync_fx.graph.operator_costs import changes_format, needs_cast
from qsync_fx.ops import Kind
from qsync_fx.plan import Plan
from qsync_fx.plan.operator_id import OpId
from qsync_fx.predictor.model.model_graph import (
    Choices,
    Follows,
    ModelGraph,
    ModelOperator,
    ModelRead,
    Name,
    StateNames,
    chosen,
    followed,
    format_named,
    widest,
)

Asked = Plan | Mapping[str, str]
"""A plan, or the format of each adjustable operator by its id."""


@dataclass(frozen=True)
class PlannedCast:
    """Conversion or quantization of a value.

    Attributes:
        owner: index of the operator that it is charged to.
        value: index of the value.
        wanted: whether it is a conversion of the model itself, which is an operator of its own.
    """

    owner: int
    value: int
    before: str
    after: str
    wanted: bool = False


@dataclass(frozen=True)
class States:
    """Formats and casts of all operators under a plan.

    Attributes:
        names: precision and output format of each operator.
        casts: casts in execution order.
        unpacked: conversions of saved scaled tensors in the backward pass, charged to the operator
            whose backward pass needs them first.
    """

    graph: ModelGraph
    names: tuple[StateNames, ...]
    casts: tuple[PlannedCast, ...]
    unpacked: tuple[PlannedCast, ...]

    def format_of(self, value: int) -> Name:
        """Return the format of a value by its index."""
        return _format_of(self.graph, self.names, value)

    def saved(self) -> dict[Kept, Size]:
        """Return the bytes saved for backward by value and format; shared tensors count once."""
        result: dict[Kept, Size] = {}
        for operator, names in zip(self.graph.operators, self.names, strict=True):
            result |= operator.costs[names].saved
        return result


def states(graph: ModelGraph, requested: Asked) -> States:
    """Return the states and casts of a model under a plan; raise `PlanError` if it does not fit."""
    return settled(graph, state_names(graph, requested))


def state_names(graph: ModelGraph, requested: Asked) -> list[StateNames]:
    """Return the precision and output format of each operator; raise as `states` does."""
    precisions = planned(graph, requested)
    # Scaled outputs depend on their readers' precisions but do not widen them: two sweeps suffice.
    narrow = _swept(graph, precisions, set())
    computed = [precision for precision, _ in narrow]
    wide = {index for index, name in precisions.items() if is_wide(graph, index, name, computed)}
    return _swept(graph, precisions, wide)


def is_wide(graph: ModelGraph, index: int, precision: str, computed: Sequence[Name]) -> bool:
    """Return whether an adjustable operator has a wide output, as all readers compute wide.

    `computed` are the precisions of all operators without wide outputs.
    """
    choices = graph.operators[index].decided
    if not isinstance(choices, Choices) or choices.wide is None or not FORMATS[precision].scaled:
        return False
    readers = ((graph.operators[i].kind, format_named(computed[i])) for i in choices.readers)
    return all(wants_wide(Kind(kind), fmt) for kind, fmt in readers)


def operator_state(
    decided: Choices | Follows, outputs: Sequence[Name], planned: str | None, wide: bool
) -> StateNames:
    """Return the precision and output of an operator, given the outputs of earlier ones.

    `planned` is the precision of an adjustable operator, `wide` whether its output is wide.
    """
    if isinstance(decided, Choices):
        assert planned is not None, "adjustable operators have a planned precision"
        return planned, (decided.wide if wide else decided.outputs.get(planned))
    promotion = decided.given
    for index in decided.operators:
        promotion = widest(promotion, outputs[index])
    name = followed(decided, promotion)
    return name, decided.named or name


def settled(graph: ModelGraph, result: Sequence[StateNames]) -> States:
    """Return `States` for known operator formats, with the casts that they require."""
    casts, unpacked = tuple(_casts(graph, result)), tuple(_unpacked(graph, result))
    return States(graph, tuple(result), casts, unpacked)


def planned(graph: ModelGraph, requested: Asked) -> dict[int, str]:
    """Return the precision of each adjustable operator by index; raise as `states` does."""
    adjustable = {
        op.id: (index, op.decided)
        for index, op in enumerate(graph.operators)
        if isinstance(op.decided, Choices)
    }
    if isinstance(requested, Plan):
        requested.check([OpId.parse(name) for name in adjustable], complete=True)
    elif unknown := [name for name in requested if name not in adjustable]:
        message = f"no adjustable operator of the model is called {unknown[0]!r}"
        raise PlanError(message, do=nearest(unknown[0], adjustable))
    result: dict[int, str] = {}
    for operator, (index, choices) in adjustable.items():
        where, explicit = graph.operators[index].where, True
        if isinstance(requested, Plan):
            choice = requested.precision_for(OpId.parse(operator))
            assert choice is not None, "a plan that was checked names all"
            name, explicit = choice.precision.name, choice.explicit
        elif operator in requested:
            name = requested[operator]
        else:
            raise PlanError("an operator has no format", where=where, do="give each operator one")
        check_format(graph, name, where)
        result[index] = chosen(choices, name, explicit)
    return result


def check_format(graph: ModelGraph, name: str, where: str) -> None:
    """Raise `PlanError` if the graph contains no costs of a format."""
    if name not in graph.formats:
        do = f"{nearest(name, graph.formats)}; or measure the model with precisions=(..., {name!r})"
        raise PlanError(f"the model graph was not made for plans with {name!r}", where=where, do=do)


def _swept(graph: ModelGraph, precisions: Mapping[int, str], wide: Set[int]) -> list[StateNames]:
    result: list[StateNames] = []
    outputs: list[Name] = []
    for index, operator in enumerate(graph.operators):
        planned = precisions.get(index)
        result.append(operator_state(operator.decided, outputs, planned, index in wide))
        outputs.append(result[-1][1])
    return result


def _casts(graph: ModelGraph, result: Sequence[StateNames]) -> Iterator[PlannedCast]:
    """Yield the required casts; readings of one cast point share one cast per format."""
    made: set[tuple[int | None, str]] = set()

    def cast(read: ModelRead, precision: Name, owner: int | None) -> Iterator[PlannedCast]:
        if read.point is None or owner is None:
            return
        before = format_named(_format_of(graph, result, read.origin))
        used = format_named(_format_of(graph, result, read.value))
        wanted = format_named(read.wanted[precision or ""])
        if before is None or wanted is None or not needs_cast(before, used, wanted):
            return
        if (read.point, wanted.name) not in made:
            made.add((read.point, wanted.name))
            yield PlannedCast(owner, read.origin, before.name, wanted.name)

    def change(index: int, value: int, before: Name, wanted: bool) -> Iterator[PlannedCast]:
        after = result[index][1]
        if before is None or after is None:
            return
        if changes_format(FORMATS[before], FORMATS[after], wanted):
            yield PlannedCast(index, value, before, after, wanted)

    for index, operator in enumerate(graph.operators):
        if operator.converts:
            value = operator.reads[0].value
            yield from change(index, value, _format_of(graph, result, value), wanted=True)
            continue
        for read in operator.reads:
            yield from cast(read, result[index][0], index)
        if operator.converted:
            before = graph.values[operator.result].own
            yield from change(index, operator.result, before, wanted=False)
    for read in graph.outputs:
        yield from cast(read, None, graph.values[read.origin].operator)


def _unpacked(graph: ModelGraph, result: Sequence[StateNames]) -> list[PlannedCast]:
    saved: dict[tuple[int | None, str], PlannedCast] = {}
    for index, operator in enumerate(graph.operators):
        precision = result[index][0]
        for read in operator.reads:
            plain = unpacked_format(operator, read, precision)
            if precision is not None and plain is not None:
                # The last reader runs backward first.
                cast = PlannedCast(index, read.origin, precision, plain)
                saved[read.point, precision] = cast
    return list(saved.values())


def unpacked_format(operator: ModelOperator, read: ModelRead, precision: Name) -> Name:
    """Return the format to which the backward pass converts a saved scaled operand; else None."""
    decided = operator.decided
    if precision is None or not isinstance(decided, Choices):
        return None
    if read.wanted.get(precision) != precision:
        return None
    factors = [item for item in operator.reads if item.wanted.get(precision) == precision]
    # A factor is saved for the gradient of the other factor.
    if not any(item.gradient for item in factors if item is not read):
        return None
    return decided.unpacked.get(precision)


def _format_of(graph: ModelGraph, result: Sequence[StateNames], index: int) -> Name:
    value = graph.values[index]
    if value.operator is None:
        return value.own
    return result[value.operator][1] or value.own
