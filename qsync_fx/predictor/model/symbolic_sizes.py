"""Symbolic sizes: their text form, such as "64*batch*sequence + 4", and numbers for their symbols.

A text has the syntax of a Python expression of whole numbers, names, `+`, `-`, `*`, division by a
number, powers, and functions in `FUNCTIONS`. It may come from any source, so its syntax tree is
read and never evaluated as code. Invariant: `read(written(size)) == size` for a `canonical` size.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import sympy

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.graph.cost_algebra import ON_NUMBERS, Cost, Size, numbers
from qsync_fx.predictor.model.model_graph import ModelGraph, StateNames
from qsync_fx.serialization.strict_json import Malformed
from qsync_fx.torch_internals import sympy_functions

FUNCTIONS: Final = {name: getattr(sympy_functions, name) for name in ON_NUMBERS}
"""torch's functions of symbolic sizes that may occur in addition to sums and products."""

_LONGEST, _DEEPEST, _DEGREE, _LARGEST = 4000, 24, 64, 10**40
_TERMS, _FACTORS = (ast.Add, ast.Sub), (ast.Mult, ast.Div)


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a size."""
    return sympy.Symbol(name, integer=True, positive=True)


def canonical(size: Any) -> Size:
    """Return a size in the form of `read`; raise `Malformed` if it is no valid tensor size."""
    return size if type(size) is int else read(written(size))


def written(size: Any) -> str:
    """Return a size as text; raise `Malformed` if it is no valid tensor size."""
    if isinstance(size, int) or (isinstance(size, float) and size.is_integer()):
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
    try:
        result, _ = _parsed(ast.parse(text.strip(), mode="eval").body, _DEEPEST)
    # The parser and torch's functions of sizes raise errors of many classes.
    except Exception as error:  # noqa: BLE001
        raise Malformed(f" has an invalid size {text[:120]!r}: {error}") from None
    return int(result) if result.is_Integer else result


def _parsed(node: ast.expr, depth: int) -> tuple[Any, int]:
    """Return the expression of a syntax tree, and an upper bound on its degree."""
    if not depth:
        raise ValueError("it is nested too deeply")
    match node:
        case ast.Constant(value=int(number)) if type(number) is int and number < _LARGEST:
            return sympy.Integer(number), 0
        case ast.Name(id=name):
            return symbol(name), 1
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.UnaryOp):
            result, degree = _parsed(operand, depth - 1)
            return -result, degree
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            result, degree = _parsed(base, depth - 1)
            return sympy.Pow(result, exponent), _checked(max(degree, 1) * exponent)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            chain = _chain(node, _TERMS)
            parts = [_parsed(part, depth - 1) for _, part in chain]
            signs = [-1 if isinstance(sign, ast.Sub) else 1 for sign, _ in chain]
            terms = [sign * part for sign, (part, _) in zip(signs, parts, strict=True)]
            return sympy.Add(*terms), max(degree for _, degree in parts)
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return _parsed_product(node, depth)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            parts = [_parsed(part, depth - 1) for part in args]
            return FUNCTIONS[name](*(part for part, _ in parts)), sum(by for _, by in parts)
    raise ValueError(f"it contains {ast.unparse(node)[:40]!r}")


def _parsed_product(node: ast.BinOp, depth: int) -> tuple[Any, int]:
    factors: list[Any] = []
    total = 0
    for operation, part in _chain(node, _FACTORS):
        if not factors and isinstance(part, ast.UnaryOp):
            # The sign belongs to the product: sympy would distribute it over a first factor.
            factors.append(sympy.Integer(-1))
            part = part.operand
        factor, degree = _parsed(part, depth - 1)
        if isinstance(operation, ast.Div):
            if not factor.is_Integer or not factor:
                raise ValueError("it divides by something other than a positive number")
            factor = 1 / factor
        factors.append(factor)
        total += degree
    return sympy.Mul(*factors), _checked(total)


def _chain(
    node: ast.expr, kinds: tuple[type[ast.operator], ...]
) -> list[tuple[ast.operator | None, ast.expr]]:
    """Return the operands of left-associative operators, each with the operator before it."""
    result: list[tuple[ast.operator | None, ast.expr]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, kinds):
        result.append((node.op, node.right))
        node = node.left
    return [(None, node), *reversed(result)]


def _checked(degree: int) -> int:
    if degree > _DEGREE:
        raise ValueError(f"it is of a degree above {_DEGREE}")
    return degree


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


_SIDES = re.compile(r"(?<=\[)[^\[\]]+(?=\])")
"""Dimensions of a tensor in the description of its shape."""


class _SizedCosts(Mapping[StateNames, Cost]):
    """Costs of an operator with numbers for symbolic sizes, computed when they are read.

    A search sizes a model for a hundred batches, and reads few of the costs of each.
    """

    def __init__(self, symbolic: Mapping[StateNames, Cost], now: Mapping[Size, Size]) -> None:
        self._symbolic, self._now = symbolic, now
        self._cache: dict[StateNames, Cost] = {}

    def __getitem__(self, state: StateNames) -> Cost:
        if state not in self._cache:
            cost = self._symbolic[state]
            self._cache[state] = cost.each(lambda size: self._now.get(size, size))
        return self._cache[state]

    def __iter__(self) -> Iterator[StateNames]:
        return iter(self._symbolic)

    def __len__(self) -> int:
        return len(self._symbolic)


def sized(graph: ModelGraph, value: Mapping[str, int]) -> ModelGraph:
    """Return the model with numbers for the named symbolic sizes."""
    available = graph.symbols
    for name, number in value.items():
        if name not in available:
            do = "explain it with symbolic shapes: torch._dynamo.mark_dynamic(input, 0)"
            if available:
                do = nearest(name, available)
            raise ProfileError(f"the model has no symbolic size {name!r}", do=do)
        if type(number) is not int or number < 1:
            raise ProfileError(f"a size is a whole number from 1, not {number!r}", where=name)
    now: dict[Size, Size]
    now = dict(zip(graph.symbolic, numbers(graph.symbolic, value), strict=True))

    @functools.cache
    def shaped(text: str) -> str:
        return _shaped(text, value)

    values = [
        replace(v, numel=now.get(v.numel, v.numel), fixed=now.get(v.fixed, v.fixed))
        for v in graph.values
    ]
    operators = [
        replace(item, shape=shaped(item.shape), costs=_SizedCosts(item.costs, now))
        for item in graph.operators
    ]
    result = replace(graph, values=tuple(values), operators=tuple(operators))
    shared = graph.independent_of_sizes
    vars(result).update(independent_of_sizes=shared, places=graph.places)
    return result


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
