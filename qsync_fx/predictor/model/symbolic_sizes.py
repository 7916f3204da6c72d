"""Symbolic sizes: their text form, such as "64*batch*sequence + 4", and numbers for their symbols.

The text may come from any source, so it is parsed by this grammar and never evaluated as code:

    sum     = ["-"] product (("+" | "-") product)*
    product = power ("*" power | "/" number)*
    power   = atom ["**" number]
    atom    = number | name | function "(" sum ("," sum)* ")" | "(" sum ")"

Invariants: `read(written(size)) == size` for the results of `canonical`. Any other text raises
`Malformed` within bounded time. `sized` changes sizes only: states, casts and indices are the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import sympy
from torch.utils._sympy import functions

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.graph.cost_algebra import ON_NUMBERS, Size, numbers
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.serialization.strict_json import Malformed

FUNCTIONS: Final = {name: getattr(functions, name) for name in ON_NUMBERS}
"""torch's functions of symbolic sizes that may occur in addition to sums and products."""

_LONGEST, _DEEPEST, _DEGREE, _DIGITS = 4000, 24, 64, 40
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([A-Za-z_][A-Za-z_0-9]*)|(\*\*|[-+*/(),]))")


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a size."""
    return sympy.Symbol(name, integer=True, positive=True)


def canonical(size: Any) -> Size:
    """Return a size in the form of `read`; raise `Malformed` if it is no valid tensor size."""
    return size if type(size) is int else read(written(size))


def written(size: Any) -> str:
    """Return a size as text; raise `Malformed` if it is no valid tensor size."""
    if isinstance(size, int):
        return str(int(size))
    if isinstance(size, float) and size.is_integer():
        return str(int(size))
    if isinstance(size, sympy.Rational):
        return str(size)
    if isinstance(size, sympy.Symbol):
        return str(size.name)
    if isinstance(size, sympy.Add):
        return " + ".join(map(written, size.as_ordered_terms())).replace("+ -", "- ")
    if isinstance(size, sympy.Mul):
        return _product(size)
    if isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 0:
        return f"{_factor(size.base)}**{size.exp}"
    name = type(size).__name__
    if name in FUNCTIONS:
        return f"{name}({', '.join(map(written, size.args))})"
    raise Malformed(f"{str(size)[:120]} is no size that a file can hold")


def read(text: str) -> Size:
    """Return the size that a text denotes; raise `Malformed` for any other text."""
    if len(text) > _LONGEST:
        raise Malformed(f" has a size of {len(text)} characters")
    reader = _Reader(text)
    try:
        result, _ = reader.sum(0)
    except Malformed:
        raise
    except Exception as error:  # noqa: BLE001 - torch's size functions reject invalid arguments so
        raise Malformed(f" has a size that is none: {text[:120]!r}: {error}") from None
    reader.end()
    return int(result) if result.is_Integer else result


def _product(size: sympy.Mul) -> str:
    number, factors = size.as_coeff_mul()
    parts = [_factor(factor) for factor in sorted(factors, key=sympy.default_sort_key)]
    if number == -1:
        return "-" + "*".join(parts)
    top, bottom = number.as_numer_denom()
    if top != 1:
        parts.insert(0, str(top))
    text = "*".join(parts)
    return text if bottom == 1 else f"{text}/{bottom}"


def _factor(size: Any) -> str:
    if isinstance(size, (sympy.Add, sympy.Mul)) or size.is_negative:
        return f"({written(size)})"
    return written(size)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.token: str = ""
        self._next()

    def sum(self, depth: int) -> tuple[Any, int]:
        """Return an expression and an upper bound on its degree."""
        if depth > _DEEPEST:
            raise self._wrong("is nested too deeply")
        negative = self._take("-")
        result, degree = self._product(depth)
        terms = [-result if negative else result]
        while self.token in ("+", "-") and self.token:
            negative = self._take("-") or not self._take("+")
            term, other = self._product(depth)
            terms.append(-term if negative else term)
            degree = max(degree, other)
        return sympy.Add(*terms), degree

    def end(self) -> None:
        if self.token:
            raise self._wrong(f"has {self.token!r} behind its end")

    def _product(self, depth: int) -> tuple[Any, int]:
        result, degree = self._power(depth)
        factors = [result]
        while self.token in ("*", "/") and self.token:
            if self._take("/"):
                number = self._number()
                if not number:
                    raise self._wrong("divides by zero")
                factors.append(sympy.Rational(1, number))
            else:
                self._take("*")
                factor, other = self._power(depth)
                factors.append(factor)
                degree += other
        if degree > _DEGREE:
            raise self._wrong(f"is of a degree above {_DEGREE}")
        return sympy.Mul(*factors), degree

    def _power(self, depth: int) -> tuple[Any, int]:
        result, degree = self._atom(depth)
        if self._take("**"):
            exponent = self._number()
            degree = max(degree, 1) * exponent
            if degree > _DEGREE:
                raise self._wrong(f"is of a degree above {_DEGREE}")
            result = sympy.Pow(result, exponent)
        return result, degree

    def _atom(self, depth: int) -> tuple[Any, int]:
        if self.token.isdecimal():
            return sympy.Integer(self._number()), 0
        if self._take("("):
            result = self.sum(depth + 1)
            self._expect(")")
            return result
        name = self.token
        if not name:
            raise self._wrong("ends too early")
        if not name.isidentifier():
            raise self._wrong(f"has {name!r} instead of a number or name")
        self._next()
        if not self._take("("):
            return symbol(name), 1
        if name not in FUNCTIONS:
            raise self._wrong(f"has an unknown function {name!r}")
        arguments = [self.sum(depth + 1)]
        while self._take(","):
            arguments.append(self.sum(depth + 1))
        self._expect(")")
        return FUNCTIONS[name](*(argument for argument, _ in arguments)), sum(
            degree for _, degree in arguments
        )

    def _number(self) -> int:
        if not self.token.isdecimal() or len(self.token) > _DIGITS:
            raise self._wrong(f"lacks a whole number of at most {_DIGITS} digits")
        result = int(self.token)
        self._next()
        return result

    def _take(self, token: str) -> bool:
        if self.token != token:
            return False
        self._next()
        return True

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._wrong(f"lacks {token!r}")

    def _next(self) -> None:
        if not self.text[self.at :].strip():
            self.token = ""
            return
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise self._wrong(f"has {self.text[self.at : self.at + 10]!r}")
        self.token, self.at = match.group().strip(), match.end()

    def _wrong(self, why: str) -> Malformed:
        return Malformed(f" has a size that {why}: {self.text[:120]!r}")


_SIDES = re.compile(r"(?<=\[)[^\[\]]+(?=\])")
"""Dimensions of a tensor in the description of its shape."""


def symbols(graph: ModelGraph) -> frozenset[str]:
    """Return the names of a model's symbolic sizes."""
    result = (size for size in set(sizes_of(graph)) if isinstance(size, sympy.Basic))
    return frozenset(
        symbol.name
        for size in result
        for symbol in size.free_symbols
        if isinstance(symbol, sympy.Symbol)
    )


def sized(graph: ModelGraph, value: Mapping[str, int]) -> ModelGraph:
    """Return the model with numbers for the named symbolic sizes."""
    available = symbols(graph)
    for name, number in value.items():
        if name not in available:
            do = "explain it with symbolic shapes: torch._dynamo.mark_dynamic(input, 0)"
            if available:
                do = nearest(name, available)
            raise ProfileError(f"the model has no symbolic size {name!r}", do=do)
        if type(number) is not int or number < 1:
            raise ProfileError(f"a size is a whole number from 1, not {number!r}", where=name)
    distinct = [size for size in dict.fromkeys(sizes_of(graph)) if isinstance(size, sympy.Basic)]
    now: dict[Size, Size] = dict(zip(distinct, numbers(distinct, value), strict=True))

    def size(before: Size) -> Size:
        return now.get(before, before)

    values = [
        dataclasses.replace(value, numel=size(value.numel), fixed=size(value.fixed))
        for value in graph.values
    ]
    operators = [
        dataclasses.replace(
            op,
            shape=_shaped(op.shape, value),
            costs={state: before.each(size) for state, before in op.costs.items()},
        )
        for op in graph.operators
    ]
    return dataclasses.replace(graph, values=tuple(values), operators=tuple(operators))


def _shaped(text: str, value: Mapping[str, int]) -> str:
    """Return a shape description with numbers for the named sizes; unreadable sizes stay."""

    def side(before: str) -> str:
        try:
            return written(numbers([read(before)], value)[0])
        except Malformed:
            return before

    return _SIDES.sub(lambda result: ", ".join(map(side, result[0].split(", "))), text)


def sizes_of(graph: ModelGraph) -> Iterator[Size]:
    """Yield every size of a model graph, including duplicates."""
    for value in graph.values:
        yield from (value.numel, value.fixed)
    for operator in graph.operators:
        for cost in operator.costs.values():
            yield from cost.sizes
