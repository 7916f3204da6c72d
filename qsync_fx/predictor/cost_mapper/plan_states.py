"""Operator states and casts of a model under a plan, predicted from a `ModelGraph`.

Invariant: the result equals `explanation.replanned(plan)`: the same precisions and outputs, and the
same casts, charged to the same operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qsync_fx.errors import PlanError, nearest
from qsync_fx.formats import FORMATS
from qsync_fx.graph.cascade_rules import wants_wide
from qsync_fx.graph.cost_algebra import Cost, Kept, Size
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import cast_cost, changes_format, needs_cast
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
    state_named,
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
        before, after: names of the formats.
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
        graph: the model.
        names: precision and output format of each operator.
        casts: casts in execution order.
        unpacked: conversions of saved scaled tensors in the backward pass, charged to the operator
            whose backward pass needs them first.
    """

    graph: ModelGraph
    names: tuple[StateNames, ...]
    casts: tuple[PlannedCast, ...]
    unpacked: tuple[PlannedCast, ...]

    def of(self, operator: str) -> OperandState:
        """Return the state of an operator by its id."""
        return state_named(self.names[self.graph.place(operator)])

    def held(self, value: int) -> Name:
        """Return the format of a value by its index."""
        return _held(self.graph, self.names, value)

    def cost(self, operator: str) -> Cost:
        """Return the cost of an operator, including its casts."""
        index = self.graph.place(operator)
        owned = self.graph.operators[index].costs[self.names[index]]
        return sum(
            (self._cast_cost(cast) for cast in self.casts if cast.owner == index), start=owned
        )

    def saved(self) -> dict[Kept, Size]:
        """Return the bytes saved for backward by value and format; shared tensors count once."""
        result: dict[Kept, Size] = {}
        for operator, names in zip(self.graph.operators, self.names, strict=True):
            result |= operator.costs[names].saved
        return result

    def _cast_cost(self, cast: PlannedCast) -> Cost:
        value, before, after = (
            self.graph.values[cast.value],
            FORMATS[cast.before],
            FORMATS[cast.after],
        )
        read, written = (value.numel * fmt.dtype.itemsize for fmt in (before, after))
        return cast_cost(read, written, after, value.differentiated)


def states(graph: ModelGraph, requested: Asked) -> States:
    """Return the operator states and casts of a model under a plan.

    Raises:
        PlanError: the plan does not fit the model, or requests a format that the graph lacks.
    """
    return settled(graph, state_names(graph, requested))


def state_names(graph: ModelGraph, requested: Asked) -> list[StateNames]:
    """Return the precision and output format of each operator; raise as `states` does."""
    precisions = planned(graph, requested)
    # Scaled outputs depend on their readers' precisions but do not widen them: two sweeps suffice.
    narrow = _swept(graph, precisions, frozenset())
    wide = frozenset(
        index
        for index in precisions
        if wants_all_wide(
            graph,
            index,
            [narrow[reader][0] for reader in _choices(graph, index).readers],
            precisions[index],
        )
    )
    if not wide:
        return narrow
    return _swept(graph, precisions, wide)


def settled(graph: ModelGraph, result: Sequence[StateNames]) -> States:
    """Return `States` for known operator formats, with the casts that they require."""
    return States(
        graph, tuple(result), tuple(_casts(graph, result)), tuple(_unpacked(graph, result))
    )


def planned(graph: ModelGraph, requested: Asked) -> dict[int, str]:
    """Return the precision of each adjustable operator by index; raise as `states` does."""
    adjustable = [
        index for index, op in enumerate(graph.operators) if isinstance(op.decided, Choices)
    ]
    existing = set(adjustable)
    if isinstance(requested, Plan):
        requested.check(
            [OpId.parse(graph.operators[index].id) for index in adjustable], complete=True
        )
    elif unknown := next(
        (name for name in requested if graph.places.get(name) not in existing), None
    ):
        available = [graph.operators[index].id for index in adjustable]
        raise PlanError(
            f"no adjustable operator of the model is called {unknown!r}",
            do=nearest(unknown, available),
        )
    result: dict[int, str] = {}
    for index in adjustable:
        operator, explicit = graph.operators[index], True
        if isinstance(requested, Plan):
            choice = requested.precision_for(OpId.parse(operator.id))
            assert choice is not None, "a plan that was checked names all"
            name, explicit = choice.precision.name, choice.explicit
        elif operator.id in requested:
            name = requested[operator.id]
        else:
            raise PlanError(
                "an operator has no format", where=operator.where, do="give each operator one"
            )
        check_format(graph, name, operator.where)
        result[index] = chosen(_choices(graph, index), name, explicit)
    return result


def check_format(graph: ModelGraph, name: str, where: str) -> None:
    """Raise `PlanError` if the graph contains no costs of a format."""
    if name not in graph.formats:
        do = (
            f"{nearest(name, graph.formats)}; or measure the model in it too, "
            f"precisions=(..., {name!r}); a graph of your own has the formats of "
            "model_graph(explanation, formats=...)"
        )
        raise PlanError(f"the model graph was not made for plans with {name!r}", where=where, do=do)


def wants_all_wide(graph: ModelGraph, index: int, readers: Sequence[Name], precision: str) -> bool:
    """Return whether an operator in `precision` has a wide output, given its readers' formats."""
    choices = _choices(graph, index)
    if choices.wide is None or not FORMATS[precision].scaled:
        return False
    kinds = (graph.operators[reader].kind for reader in choices.readers)
    return all(
        wants_wide(Kind(kind), format_named(name))
        for kind, name in zip(kinds, readers, strict=True)
    )


def _choices(graph: ModelGraph, index: int) -> Choices:
    result = graph.operators[index].decided
    assert isinstance(result, Choices)
    return result


def _swept(
    graph: ModelGraph, precisions: Mapping[int, str], wide: frozenset[int]
) -> list[StateNames]:
    result: list[StateNames] = []
    for index, operator in enumerate(graph.operators):
        decided = operator.decided
        if isinstance(decided, Choices):
            output = decided.outputs.get(precisions[index])
            if index in wide:
                output = decided.wide
            result.append((precisions[index], output))
        else:
            name = _followed(decided, result)
            result.append((name, decided.named or name))
    return result


def _followed(follows: Follows, result: Sequence[StateNames]) -> Name:
    promotion = follows.given
    for index in follows.operators:
        promotion = widest(promotion, result[index][1])
    return followed(follows, promotion)


def _casts(graph: ModelGraph, result: Sequence[StateNames]) -> Iterator[PlannedCast]:
    """Yield the required casts; readings of one cast point share one cast per format."""
    made: set[tuple[int | None, str]] = set()
    for index, operator in enumerate(graph.operators):
        precision, output = result[index]
        if operator.converts:
            value = operator.reads[0].value
            yield from _change(index, value, _held(graph, result, value), output, wanted=True)
            continue
        for read in operator.reads:
            yield from _cast(graph, result, made, read, precision, index)
        if operator.converted:
            before = graph.values[operator.result].own
            yield from _change(index, operator.result, before, output, wanted=False)
    for read in graph.outputs:
        yield from _cast(graph, result, made, read, None, graph.values[read.origin].operator)


def _change(
    index: int, value: int, before: Name, after: Name, wanted: bool
) -> Iterator[PlannedCast]:
    if before is None or after is None:
        return
    if changes_format(FORMATS[before], FORMATS[after], wanted):
        yield PlannedCast(index, value, before, after, wanted)


def _cast(
    graph: ModelGraph,
    result: Sequence[StateNames],
    made: set[tuple[int | None, str]],
    read: ModelRead,
    precision: Name,
    owner: int | None,
) -> Iterator[PlannedCast]:
    """Yield the cast of an operand unless it needs none or shares one in `made`."""
    if read.point is None or owner is None:
        return
    before = format_named(_held(graph, result, read.origin))
    used = format_named(_held(graph, result, read.value))
    wanted = format_named(read.wanted[precision or ""])
    if before is None or wanted is None or not needs_cast(before, used, wanted):
        return
    if (read.point, wanted.name) not in made:
        made.add((read.point, wanted.name))
        yield PlannedCast(owner, read.origin, before.name, wanted.name)


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


def _held(graph: ModelGraph, result: Sequence[StateNames], index: int) -> Name:
    value = graph.values[index]
    if value.operator is None:
        return value.own
    return result[value.operator][1] or value.own
