"""Cost algebra: operations, bytes moved and bytes saved for backward.

Invariant: costs are values that `sum` adds. Sizes are integers, or sympy expressions of a graph's
symbolic sizes, which `at` substitutes. Saved bytes count by value: a tensor that several operators
save in one format counts once, in any order of addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import sympy

Size = Any  # an integer, or a sympy expression
Kept = tuple[str, str]
"""A saved value: the name of the tensor, and the format in which it is saved."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations, 2 per multiply-add, and bytes read and written."""

    flops: Size = 0
    bytes: Size = 0

    def __add__(self, other: object) -> Work:
        if other == 0:  # the start of `sum`
            return self
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    __radd__ = __add__


@dataclass(frozen=True)
class Cost:
    """Cost of one or several operators in one training step.

    Attributes:
        input_gradient: gradients of its operands except parameters.
        weight_gradient: gradients of its parameters.
        casts, casts_backward: conversions and quantizers inserted for it, and their gradients.
        recomputed: recomputation by activation checkpointing.
        saved: bytes saved for backward, by value, without unconverted parameters and graph inputs,
            which are in memory anyway.
    """

    forward: Work = Work()
    input_gradient: Work = Work()
    weight_gradient: Work = Work()
    casts: Work = Work()
    casts_backward: Work = Work()
    recomputed: Work = Work()
    saved: Mapping[Kept, Size] = field(default_factory=dict, hash=False)

    def __add__(self, other: object) -> Cost:
        if other == 0:
            return self
        if not isinstance(other, Cost):
            return NotImplemented
        works = {name: work + getattr(other, name) for name, work in self._works.items()}
        return Cost(**works, saved={**self.saved, **other.saved})

    __radd__ = __add__

    @property
    def _works(self) -> dict[str, Work]:
        return {name: getattr(self, name) for name in WORKS}

    @property
    def work(self) -> Work:
        """The sum of all pieces: forward, backward, casts and recomputation."""
        return sum(self._works.values(), start=Work())

    @property
    def flops(self) -> Size:
        return self.work.flops

    @property
    def bytes(self) -> Size:
        return self.work.bytes

    @property
    def saved_bytes(self) -> Size:
        return sum(self.saved.values())

    @property
    def sizes(self) -> list[Size]:
        """All sizes: operations and bytes of each piece of work, then the saved bytes."""
        sizes = [size for work in self._works.values() for size in (work.flops, work.bytes)]
        return [*sizes, *self.saved.values()]

    def each(self, change: Callable[[Size], Size]) -> Cost:
        """Return the cost with `change` applied to each of `sizes`, in their order."""
        works = {
            name: Work(change(work.flops), change(work.bytes)) for name, work in self._works.items()
        }
        return Cost(**works, saved={name: change(size) for name, size in self.saved.items()})

    def renamed(self, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Cost:
        if not names:
            return self
        return self.each(
            lambda size: size.xreplace(names) if isinstance(size, sympy.Basic) else size
        )

    def at(self, **sizes: int) -> Cost:
        """Return the cost with numbers for the named symbolic sizes; other sizes stay symbolic.

        Example:
            >>> import sympy
            >>> batch = sympy.Symbol("batch")
            >>> Cost(Work(flops=batch * 10)).at(batch=32).flops
            320
        """
        values = iter(numbers(self.sizes, sizes))
        return self.each(lambda _: next(values))


WORKS = tuple(part.name for part in fields(Cost) if part.name != "saved")
"""The names of a cost's pieces of work."""


def numbers(expressions: Iterable[Size], sizes: Mapping[str, int]) -> list[Size]:
    """Evaluate expressions for the symbolic sizes named in `sizes`, in one compiled function."""
    names = tuple(sorted(sizes))
    return _function(tuple(expressions), names)(*(sizes[name] for name in names))


@functools.lru_cache(maxsize=64)
def _function(expressions: tuple[Size, ...], names: tuple[str, ...]) -> Callable[..., list[Size]]:
    """Return a function from sizes to all expressions, compiled if all symbols are named."""
    used = {s for e in expressions if isinstance(e, sympy.Basic) for s in e.free_symbols}
    symbols = {str(symbol): symbol for symbol in used}
    inputs = [symbols.get(name, sympy.Symbol(name)) for name in names]
    if used <= set(inputs):
        # torch's functions of sizes, such as FloorDiv, need these implementations; `math` lacks
        # them.
        compiled: Callable[..., list[Size]] = sympy.lambdify(
            inputs, list(expressions), modules=[ON_NUMBERS, "math"], cse=True
        )
        return lambda *numbers: [_number(value) for value in compiled(*numbers)]

    def partly(*numbers: int) -> list[Size]:
        result = dict(zip(inputs, numbers, strict=True))
        return [_number(e.subs(result)) if isinstance(e, sympy.Basic) else e for e in expressions]

    return partly


def _number(value: Any) -> Size:
    """Return a whole number as an integer, another size unchanged."""
    is_whole = isinstance(value, sympy.Integer) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


ON_NUMBERS: dict[str, Any] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "CeilDiv": lambda a, b: -(-a // b),
    "Max": max,
    "Min": min,
}
"""torch's functions of symbolic sizes (torch.utils._sympy.functions), on integers."""
