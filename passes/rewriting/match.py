"""Pattern matching in a graph, and the matches that a rewrite receives.

Matching has two steps. The shapes of a pattern find sites with its operators in its order,
regardless of scalar arguments. Then the pattern is traced with the values of each site, and the
trace must equal the site, scalars included. torch.fx's matcher supports neither two arguments for
the same tensor nor different symbolic sizes of equal value.

Invariant: a site computes the same values as the pattern. A `Match` describes the graph before any
replacement.
"""

from __future__ import annotations

import itertools
import operator as py_operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from qsync_fx.graph.fx_utils import describe, tensors
from qsync_fx.graph.graph import Operator, PrecisionGraph
from qsync_fx.passes.rewriting.pattern import (
    Pattern,
    PatternShape,
    TracedPattern,
    Untraceable,
    operands,
    same,
)
from qsync_fx.passes.tracing.retrace import Modes, restored


@dataclass(frozen=True)
class Match:
    """A site that a rewrite has found.

    `match["x"]` is the value of the pattern's argument `x` at the site: a fake tensor, which has a
    shape and a dtype but no values, or the value of an argument with a default.

    Attributes:
        graph: the graph, with device, options and plan in its `context`.
        operators: the operators that compute the pattern, in execution order.
    """

    graph: PrecisionGraph
    operators: tuple[Operator, ...]
    _arguments: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self._arguments[argument]

    @property
    def main(self) -> Operator:
        """The last operator inside a module, else the last one; new nodes inherit its module."""
        return next((op for op in reversed(self.operators) if op.id.module), self.operators[-1])

    @property
    def module(self) -> str:
        """The path of the site's module, as in a state_dict; "" outside of any module."""
        return self.main.id.module


_Bound = dict[fx.Node, Any]


@dataclass(frozen=True)
class MatchSite:
    """A site where a pattern occurs.

    Attributes:
        arguments: the pattern's arguments by name: nodes, or the values of arguments that are not
            tensors.
        matched: the nodes that compute the pattern, in execution order.
        outputs: the nodes of its results.
    """

    arguments: Mapping[str, Any]
    matched: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def sites(
    graph: PrecisionGraph, pattern: Pattern, modes: Mapping[fx.Node, Modes]
) -> Iterator[MatchSite]:
    """Yield the sites of a pattern in the order of their first results; they may overlap."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    cache: dict[Any, TracedPattern | None] = {}
    visited: set[tuple[fx.Node, ...]] = set()
    for node in graph.nodes:
        for shape in pattern.shapes:
            for bound in _anchored(graph, shape, node):
                outputs = tuple(bound[output] for output in shape.traced.outputs)
                if outputs in visited:
                    continue
                for arguments in _arguments(pattern, shape, bound):
                    exact = _confirmed(graph, pattern, arguments, outputs, modes[node], cache)
                    if exact is not None:
                        visited.add(outputs)
                        calls = {item for item in exact if item.op == "call_function"}
                        matched = tuple(sorted(calls, key=order.__getitem__))
                        yield MatchSite(arguments, matched, outputs)
                        break


def _anchored(graph: PrecisionGraph, shape: PatternShape, node: fx.Node) -> Iterator[_Bound]:
    """Yield the bindings with a node as the first result; further results may be anywhere."""
    first, *others = dict.fromkeys(shape.traced.outputs)
    bound: _Bound = {}
    if not _fits(first, node, bound, exact=False):
        return
    todo = [bound]
    for output in others:
        todo = [more for entry in todo for more in _also(graph, output, entry)]
    yield from todo


def _also(graph: PrecisionGraph, output: fx.Node, available: _Bound) -> Iterator[_Bound]:
    if output in available:
        yield available
        return
    for node in graph.nodes:
        bound = dict(available)
        if _fits(output, node, bound, exact=False):
            yield bound


def _arguments(pattern: Pattern, shape: PatternShape, bound: _Bound) -> Iterator[dict[str, Any]]:
    """Yield candidate values of the arguments.

    A default that occurs at several positions of the pattern has a candidate for each position.
    """
    nodes = dict(zip(pattern.tensors, (bound[node] for node in shape.traced.inputs), strict=True))
    choices: list[list[Any]] = []
    for shown in shape.literals.values():
        result: list[Any] = []
        for node, name in shown:
            if node not in bound:
                continue
            value = operands(bound[node]).get(name)
            if not any(same(value, other) for other in result):
                result.append(value)
        choices.append(result)
    for values in itertools.product(*choices):
        yield {**nodes, **dict(zip(shape.literals, values, strict=True))}


def _confirmed(
    graph: PrecisionGraph,
    pattern: Pattern,
    arguments: Mapping[str, Any],
    outputs: tuple[fx.Node, ...],
    modes: Modes,
    cache: dict[Any, TracedPattern | None],
) -> list[fx.Node] | None:
    """Return the nodes of a site that matches exactly; None for a different computation."""
    leaves = [leaf for leaf in pytree.tree_leaves(dict(arguments)) if isinstance(leaf, fx.Node)]
    literals = str({name: value for name, value in arguments.items() if value not in leaves})
    key = (modes, *(_kind(graph.value(leaf)) for leaf in leaves), literals)
    if key not in cache:
        cache[key] = _traced(graph, pattern, arguments, modes)
    traced = cache[key]
    if traced is None or len(traced.outputs) != len(outputs):
        return None
    bound: _Bound = dict(zip(traced.inputs, leaves, strict=True))
    for output, node in zip(traced.outputs, outputs, strict=True):
        if not _fits(output, node, bound, exact=True):
            return None
    return [node for node in bound.values() if isinstance(node, fx.Node) and node not in leaves]


def _traced(
    graph: PrecisionGraph, pattern: Pattern, arguments: Mapping[str, Any], modes: Modes
) -> TracedPattern | None:
    assert graph.context.fake_mode is not None
    with restored(), graph.context.fake_mode:
        modes.apply()
        try:
            return pattern.with_values(fx.node.map_arg(dict(arguments), graph.value), graph.context)
        except Untraceable:
            return None


def _kind(value: Any) -> Any:
    """Return the properties of a value that a trace depends on."""
    if isinstance(value, torch.Tensor):
        return describe(value), str(value.stride()), value.device, value.requires_grad
    return str(value)


def _fits(pattern: Any, result: Any, bound: _Bound, exact: bool) -> bool:
    """Return whether `result` computes `pattern`, if `exact` with its scalars; fill `bound`."""
    if isinstance(pattern, fx.Node) and tensors(pattern.meta.get("val")):
        if pattern in bound:
            return bound[pattern] is result
        if not isinstance(result, fx.Node) or not tensors(result.meta.get("val")):
            return False
        if pattern.op != "placeholder":
            if result.op != "call_function" or result.target != pattern.target:
                return False
            inputs, used = operands(pattern), operands(result)
            exactly = exact or pattern.target is py_operator.getitem
            if inputs.keys() != used.keys():
                return False
            if not all(_fits(inputs[k], used[k], bound, exactly) for k in inputs):
                return False
        bound[pattern] = result
        return True
    if not _holds_tensors(pattern) and not _holds_tensors(result):
        return not exact or same(pattern, result)
    if not isinstance(pattern, list | tuple) or not isinstance(result, list | tuple):
        return False
    if len(pattern) != len(result):
        return False
    return all(_fits(p, r, bound, exact) for p, r in zip(pattern, result, strict=True))


def _holds_tensors(value: Any) -> bool:
    result: list[Any] = []
    fx.node.map_arg(value, lambda node: result.extend(tensors(node.meta.get("val"))))
    return bool(result)
