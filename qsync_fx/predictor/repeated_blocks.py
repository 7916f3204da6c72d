"""Isomorphic blocks of a model, such as the layers of a transformer, which can share decisions.

A block contains the operators of a module and its submodules. Two blocks are isomorphic if their
operators are equal position by position, and each operand comes from the same position of the
block, or from outside of it. No operator is in two of the returned blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from qsync_fx.plan.operator_id import OpId
from qsync_fx.predictor.model.model_graph import Choices, ModelGraph, ModelOperator


@dataclass(frozen=True)
class Blocks:
    """Isomorphic blocks.

    Attributes:
        modules: path of each block's module.
        operators: ids of each block's operators, in execution order.
    """

    modules: tuple[str, ...]
    operators: tuple[tuple[str, ...], ...]

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Operators at the same position of each block, one tuple per position."""
        return tuple(zip(*self.operators, strict=True))


def isomorphic_blocks(graph: ModelGraph, sizes: bool = True, least: int = 2) -> tuple[Blocks, ...]:
    """Return the largest isomorphic blocks of a model, in descending order of operator count.

    Args:
        sizes: whether sizes and costs must be equal, in addition to operators and connections.
        least: minimum number of operators of a block.
    """
    inside = _operators_of_modules(graph)
    equal: dict[Hashable, list[str]] = {}
    for module, places in inside.items():
        if len(places) >= least:
            equal.setdefault(_structure(graph, places, sizes), []).append(module)
    result: list[Blocks] = []
    used: set[int] = set()
    for modules in sorted(equal.values(), key=lambda modules: -len(inside[modules[0]])):
        free: list[str] = []
        for module in modules:
            # A module that only wraps another one is the same block.
            if used.isdisjoint(inside[module]) and all(
                inside[module] != inside[other] for other in free
            ):
                free.append(module)
        if len(free) > 1:
            used.update(place for module in free for place in inside[module])
            names = (
                tuple(graph.operators[place].id for place in inside[module]) for module in free
            )
            result.append(Blocks(tuple(free), tuple(names)))
    return tuple(result)


def _operators_of_modules(graph: ModelGraph) -> Mapping[str, list[int]]:
    result: dict[str, list[int]] = {}
    for place, operator in enumerate(graph.operators):
        parts = OpId.parse(operator.id).module.split(".")
        for end in range(1, len(parts) + 1):
            if parts[0]:
                result.setdefault(".".join(parts[:end]), []).append(place)
    return result


def _structure(graph: ModelGraph, places: list[int], sizes: bool) -> Hashable:
    """Return a key that is equal for isomorphic blocks."""
    numbers = {place: number for number, place in enumerate(places)}
    points: dict[int | None, int] = {}
    return tuple(
        _operator(graph, graph.operators[place], numbers, points, sizes) for place in places
    )


def _operator(
    graph: ModelGraph,
    operator: ModelOperator,
    numbers: Mapping[int, int],
    points: dict[int | None, int],
    sizes: bool,
) -> Hashable:
    reads: list[Hashable] = []
    for read in operator.reads:
        value = graph.values[read.value]
        source: int | str = value.source
        if value.operator is not None:
            source = numbers.get(value.operator, "outside")
        shared = points.setdefault(read.point, len(points)) if read.point is not None else None
        wanted = tuple(read.wanted.items())
        reads.append((read.role, source, value.own, read.gradient, shared, wanted))
        if sizes:
            reads.append((value.numel, value.fixed))
    decided = operator.decided
    if isinstance(decided, Choices):
        settings: Hashable = (
            tuple(decided.runs.items()),
            decided.held,
            decided.keeps,
            decided.pinned,
            decided.wide,
        )
    else:
        settings = (decided.own, decided.promotes, decided.scalar, decided.named)
    costs = tuple((state, *cost.sizes) for state, cost in operator.costs.items()) if sizes else ()
    return (
        operator.row,
        operator.kind,
        operator.repeated,
        operator.converts,
        settings,
        tuple(reads),
        costs,
    )
