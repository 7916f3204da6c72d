"""Numbers in the place of a model's symbolic sizes, so that another batch needs no other trace.

Invariant: nothing but sizes changes: plans mean what they meant, and states, casts and places are the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import sympy

from qsync_fx.codec import Malformed
from qsync_fx.errors import ProfileError, nearest
from qsync_fx.graph.algebra import Size, numbers
from qsync_fx.predictor.model.sizes import read, written
from qsync_fx.predictor.model.value import ModelGraph

_SIDES = re.compile(r"(?<=\[)[^\[\]]+(?=\])")
"""The sides of a tensor in the description of its shape."""


def symbols(graph: ModelGraph) -> frozenset[str]:
    """Returns the names of a model's symbolic sizes."""
    found = (size for size in set(sizes_of(graph)) if isinstance(size, sympy.Basic))
    return frozenset(symbol.name for size in found for symbol in size.free_symbols if isinstance(symbol, sympy.Symbol))


def sized(graph: ModelGraph, given: Mapping[str, int]) -> ModelGraph:
    """Returns the model with numbers for the sizes that are named."""
    known = symbols(graph)
    for name, number in given.items():
        if name not in known:
            do = (
                nearest(name, known)
                if known
                else "explain it with symbolic shapes: torch._dynamo.mark_dynamic(input, 0)"
            )
            raise ProfileError(f"the model has no symbolic size {name!r}", do=do)
        if type(number) is not int or number < 1:
            raise ProfileError(f"a size is a whole number from 1, not {number!r}", where=name)
    distinct = [size for size in dict.fromkeys(sizes_of(graph)) if isinstance(size, sympy.Basic)]
    now: dict[Size, Size] = dict(zip(distinct, numbers(distinct, given), strict=True))

    def size(before: Size) -> Size:
        return now.get(before, before) if isinstance(before, sympy.Basic) else before

    values = [dataclasses.replace(value, numel=size(value.numel), fixed=size(value.fixed)) for value in graph.values]
    operators = [
        dataclasses.replace(
            op,
            shape=_shaped(op.shape, given),
            costs={state: before.each(size) for state, before in op.costs.items()},
        )
        for op in graph.operators
    ]
    return dataclasses.replace(graph, values=tuple(values), operators=tuple(operators))


def _shaped(text: str, given: Mapping[str, int]) -> str:
    """Returns the description of a shape with numbers for the sizes that are named; what cannot be read stays as it is."""

    def side(before: str) -> str:
        try:
            return written(numbers([read(before)], given)[0])
        except Malformed:
            return before

    return _SIDES.sub(lambda found: ", ".join(map(side, found[0].split(", "))), text)


def sizes_of(graph: ModelGraph) -> Iterator[Size]:
    """Yields every size that a model graph holds, as often as it does."""
    for value in graph.values:
        yield from (value.numel, value.fixed)
    for operator in graph.operators:
        for cost in operator.costs.values():
            yield from cost.sizes
