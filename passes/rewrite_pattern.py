"""Patterns of rewrites: functions in plain torch, and the sites that compute the same.

Invariant: an argument without a default matches any tensor; an argument with a default matches any
value at the positions where the default occurs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import operator as py_operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from qsync_fx import torch_internals as internals
from qsync_fx.errors import OptionError, PassError
from qsync_fx.graph import Context, Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import arguments, describe, tensors
from qsync_fx.options import Options
from qsync_fx.passes.tracing.graph_cleanup import without_needless_writes
from qsync_fx.passes.tracing.retrace import Modes, bakes_in_fakes, pre_dispatch, tracing
from qsync_fx.plan import Plan


@dataclass(frozen=True)
class TracedPattern:
    """A traced function, with the nodes that it returns, flattened.

    The placeholders are the arguments, then the tensors that the function captures.
    """

    module: fx.GraphModule
    tensors: tuple[Tensor, ...]
    outputs: tuple[Any, ...]
    several: bool = False

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]


class Untraceable(Exception):
    """Raised for a function without a graph; the text has the reason."""


def trace_call(
    function: Callable[..., Any], value: Mapping[str, Any], recorded: bool = False
) -> TracedPattern:
    """Trace a call by name under the active fake mode.

    Tensors and symbolic numbers, also inside lists, become inputs of the graph; other values stay
    constant.

    `recorded`: whether to record the backward pass, to detect custom autograd functions. Raises
    `Untraceable` if the function fails on these values, or a graph cannot express it.
    """
    mode = internals.active_fake_mode()
    assert mode is not None, "tracing needs a fake mode"
    lift = _Lift()
    leaves, spec = internals.tree_flatten(dict(value))
    symbolic = (Tensor, torch.SymInt, torch.SymFloat)
    inputs = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, symbolic)}
    if recorded:
        inputs = {index: _recording(leaf) for index, leaf in inputs.items()}

    def run(*args: Any) -> Any:
        lift.stand_ins = dict(zip(map(id, lift.tensors), args[len(inputs) :], strict=True))
        filled = dict(enumerate(leaves)) | dict(zip(inputs, args, strict=False))
        with lift:
            returned = function(**internals.tree_unflatten(list(filled.values()), spec))
        lift.several = isinstance(returned, (tuple, list))
        lift.outputs = list(returned) if lift.several else [returned]
        _refuse_autograd_functions(lift.outputs)
        return tuple(lift.outputs)

    while True:
        available = len(lift.tensors)
        stand_ins = [mode.from_tensor(tensor, static_shapes=True) for tensor in lift.tensors]
        try:
            module = pre_dispatch(run, [*inputs.values(), *stand_ins])
        except Untraceable:
            raise
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise Untraceable(f"{type(error).__name__}: {first_line}") from error
        if available == len(lift.tensors):  # else the next trace has the captured tensors as inputs
            return _checked(module, lift)


def _outputs(module: fx.GraphModule) -> tuple[Any, ...]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return tuple(internals.tree_leaves(output.args[0]))


def _checked(module: fx.GraphModule, lift: _Lift) -> TracedPattern:
    outputs = _outputs(module)
    all_tensors = all(isinstance(value, Tensor) for value in lift.outputs)
    if not all_tensors or len(outputs) != len(lift.outputs):
        kinds = ", ".join(type(value).__name__ for value in lift.outputs) or "nothing"
        raise Untraceable(f"it returns {kinds}, where a tensor or a tuple of tensors is expected")
    if bakes_in_fakes(module):
        message = "it computes a value outside torch's dispatcher, where tracing cannot see it"
        raise Untraceable(message)
    return TracedPattern(module, tuple(lift.tensors), outputs, lift.several)


@dataclass
class _Lift(TorchFunctionMode):
    """Mode that replaces captured tensors by graph inputs and records new ones."""

    tensors: list[Tensor] = field(default_factory=list)
    stand_ins: dict[int, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    several: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = internals.tree_map(self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, internals.FakeTensor):
            return value
        if id(value) not in self.stand_ins:
            if value.grad_fn is not None:
                message = "it refers to a tensor that was computed with gradients"
                raise Untraceable(f"{message}; refer to the inputs of that computation")
            mode = internals.active_fake_mode()
            assert mode is not None
            self.tensors.append(value)
            self.stand_ins[id(value)] = mode.from_tensor(value, static_shapes=True)
        return self.stand_ins[id(value)]


def _recording(value: Any) -> Any:
    """Return an alias whose gradient is recorded if grad mode is on."""
    if torch.is_grad_enabled() and isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _refuse_autograd_functions(outputs: Sequence[Any]) -> None:
    """Raise for custom autograd functions, except for the autograd formulas of torch.library."""
    todo: list[Any] = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
    visited = set(todo)
    while todo:
        node = todo.pop()
        name = type(node).__name__.removesuffix("Backward")
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_custom and not name.startswith("GeneratedBackwardFor_"):
            raise Untraceable(
                f"it calls the autograd function {name}, whose backward pass tracing would lose; "
                "make it an operator (torch.library.custom_op, register_autograd), or write x + "
                "(f(x) - x).detach() where gradients pass by f"
            )
        new = {before for before, _ in getattr(node, "next_functions", ())} - visited
        visited |= new
        todo += new


_SIZE = 8


@dataclass(frozen=True)
class Pattern:
    """A function whose computation a rewrite finds; `literals` are arguments with defaults."""

    function: Callable[..., Any]
    tensors: tuple[str, ...]
    literals: Mapping[str, Any]
    example: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], example: tuple[Tensor, ...] | None) -> Pattern:
        """Return the pattern of a function; raise `OptionError` if its signature is unsuitable."""
        inputs = inspect.signature(function).parameters.values()
        tensors = tuple(p.name for p in inputs if p.default is p.empty)
        problem = ""
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inputs):
            problem = "has *arguments"
        elif not tensors or (example is not None and len(example) != len(tensors)):
            problem = f"has {len(tensors)} arguments for tensors"
            if example is not None:
                problem = f"has an example of {len(example)} tensors and {len(tensors)} arguments"
        if problem:
            message = f"the pattern {function.__name__!r} {problem}"
            do = "write an argument without a default, and an example, for each tensor"
            raise OptionError(message, where=_place(function), do=do)
        literals = {p.name: p.default for p in inputs if p.default is not p.empty}
        return cls(function, tensors, literals, example)

    def with_values(self, value: Mapping[str, Any], context: Context) -> TracedPattern:
        """Trace the function with the given arguments, and normalize the trace."""
        traced = trace_call(self.function, value)
        without_needless_writes(PrecisionGraph(traced.module, list(value.values()), context))
        return TracedPattern(traced.module, traced.tensors, _outputs(traced.module))

    @functools.cached_property
    def shapes(self) -> tuple[PatternShape, ...]:
        """The graphs of the function; raise `PassError` if no example could be traced."""
        result: dict[tuple[str, ...], PatternShape] = {}
        reason = ""
        with internals.FakeTensorMode() as mode, _quiet_failures():
            context = Context(torch.device("cpu"), Options(), Plan(), mode)
            for tensors in self._examples(result):
                values = {**dict(zip(self.tensors, tensors, strict=True)), **self.literals}
                try:
                    traced = self.with_values(values, context)
                except Untraceable as error:
                    reason = reason or str(error)
                    continue
                calls = (node for node in traced.module.graph.nodes if node.op == "call_function")
                key = tuple(str(node.target) for node in calls)
                result.setdefault(key, PatternShape.of(self, traced))
        if not result:
            raise self.refuse(
                f"cannot be traced: {reason}",
                "use torch operators on its arguments; if it needs tensors of certain sizes or "
                "dtypes, pass examples: rewrite(example=(torch.empty(2, 3), ...))",
            )
        return tuple(result.values())

    def refuse(self, problem: str, do: str) -> PassError:
        message = f"the pattern {self.function.__name__!r} {problem}"
        return PassError(message, where=_place(self.function), do=do)

    def _examples(self, result: Mapping[Any, PatternShape]) -> Iterator[tuple[Tensor, ...]]:
        """Yield examples: all equal ranks, then mixed ranks until `result` is not empty."""
        if self.example is not None:
            yield tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in self.example)
            return
        count = len(self.tensors)
        equal = [(rank,) * count for rank in (2, 3, 4, 1)]
        flat = (ranks for rank in (2, 3, 4) for ranks in itertools.product((rank, 1), repeat=count))
        every = itertools.product((2, 3, 4, 1), repeat=count)
        mixed = (*itertools.islice(flat, 200), *itertools.islice(every, 200))
        for index, ranks in enumerate(dict.fromkeys((*equal, *mixed))):
            if index < len(equal) or not result:
                yield tuple(torch.empty([_SIZE] * rank) for rank in ranks)


@dataclass(frozen=True)
class PatternShape:
    """One graph of a pattern, and the nodes and arguments that have each default in `literals`."""

    traced: TracedPattern
    literals: Mapping[str, tuple[tuple[fx.Node, str], ...]]

    @classmethod
    def of(cls, pattern: Pattern, traced: TracedPattern) -> PatternShape:
        """Return the shape of a trace; raise `PassError` if it cannot serve as a pattern."""
        if traced.tensors:
            raise pattern.refuse("refers to a tensor that it is not given", "make it an argument")
        for argument, node in zip(pattern.tensors, traced.inputs, strict=False):
            if not node.users:
                raise pattern.refuse(f"does not read {argument!r}", "remove the argument")
        if any(output.op != "call_function" for output in traced.outputs):
            raise pattern.refuse("returns an argument", "return a computed tensor")
        positions = {}
        for argument, default in pattern.literals.items():
            positions[argument] = tuple(
                (node, name)
                for node in traced.module.graph.nodes
                if node.op == "call_function"
                for name, value in operands(node).items()
                if same(value, default)
            )
            if not positions[argument]:
                do = "pass it to an operator unchanged, or give it no default if it is a tensor"
                raise pattern.refuse(f"passes {argument!r} to no operator unchanged", do)
        return cls(traced, positions)


def operands(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name if its operator has names, with defaults filled in."""
    if isinstance(node.target, internals.OpOverload):
        return arguments(node)
    return {str(index): value for index, value in enumerate((*node.args, *node.kwargs.values()))}


def same(item: Any, other: Any) -> bool:
    """Return whether two non-tensor arguments are equal; `True` differs from 1."""
    if isinstance(item, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(item) == len(other) and all(map(same, item, other))
    item, other = (getattr(value, "meta", {}).get("val", value) for value in (item, other))
    symbolic = (torch.SymInt, torch.SymFloat)
    if isinstance(item, symbolic) and isinstance(other, symbolic):
        return bool(item.node.expr == other.node.expr)
    return type(item) is type(other) and bool(item == other)


def _place(function: Callable[..., Any]) -> str:
    if code := getattr(function, "__code__", None):
        return f"{code.co_filename}:{code.co_firstlineno}"
    return repr(function)


@contextlib.contextmanager
def _quiet_failures() -> Iterator[None]:
    """Suppress torch's logs about examples that cannot be traced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True)
class Match:
    """A site that a rewrite has found.

    `match["x"]` is the value of the pattern's argument `x` at the site: a fake tensor, which has a
    shape and a dtype but no values, or the value of an argument with a default.

    Attributes:
        graph: the graph, with device, options and plan in its `context`.
        arguments: the pattern's arguments by name: nodes, or the values of arguments that are not
            tensors.
        nodes: the nodes that compute the pattern, in execution order.
        outputs: the nodes of its results.
    """

    graph: PrecisionGraph
    arguments: Mapping[str, Any]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def __getitem__(self, argument: str) -> Any:
        return fx.node.map_arg(self.arguments[argument], self.graph.value)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators that compute the pattern, in execution order."""
        noted = (node for node in self.nodes if node in node_metadata.NOTE)
        return tuple(Operator(self.graph, node) for node in noted)

    @property
    def main(self) -> Operator:
        """The last operator inside a module, else the last one; new nodes inherit its module."""
        operators = self.operators
        return next((op for op in reversed(operators) if op.id.module), operators[-1])

    @property
    def module(self) -> str:
        """The path of the site's module, as in a state_dict; "" outside of any module."""
        return self.main.id.module


_Bound = dict[fx.Node, Any]
NodeModes = Mapping[fx.Node, Modes]


def sites(graph: PrecisionGraph, pattern: Pattern, modes: NodeModes) -> Iterator[Match]:
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
                for values in _arguments(pattern, shape, bound):
                    exact = _confirmed(graph, pattern, values, outputs, modes[node], cache)
                    if exact is not None:
                        visited.add(outputs)
                        calls = {item for item in exact if item.op == "call_function"}
                        matched = tuple(sorted(calls, key=order.__getitem__))
                        yield Match(graph, values, matched, outputs)
                        break


def _anchored(graph: PrecisionGraph, shape: PatternShape, node: fx.Node) -> Iterator[_Bound]:
    """Yield the bindings with a node as the first result; further results may be anywhere."""

    def extend(outputs: list[fx.Node], nodes: list[fx.Node], bound: _Bound) -> Iterator[_Bound]:
        if not outputs:
            yield bound
            return
        first, *others = outputs
        for candidate in [bound[first]] if first in bound else nodes:
            extended = dict(bound)
            if _fits(first, candidate, extended, exact=False):
                yield from extend(others, graph.nodes, extended)

    yield from extend(list(dict.fromkeys(shape.traced.outputs)), [node], {})


def _arguments(pattern: Pattern, shape: PatternShape, bound: _Bound) -> Iterator[dict[str, Any]]:
    """Yield candidate values of the arguments: a default has one for each of its positions."""
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
    leaves = [leaf for leaf in internals.tree_leaves(dict(arguments)) if isinstance(leaf, fx.Node)]
    literals = str({name: value for name, value in arguments.items() if value not in leaves})
    key = (modes, *(_kind(graph.value(leaf)) for leaf in leaves), literals)
    if key not in cache:
        with tracing(graph, modes), contextlib.suppress(Untraceable):
            values = fx.node.map_arg(dict(arguments), graph.value)
            cache[key] = pattern.with_values(values, graph.context)
    traced = cache.setdefault(key, None)
    if traced is None or len(traced.outputs) != len(outputs):
        return None
    bound: _Bound = dict(zip(traced.inputs, leaves, strict=True))
    for output, node in zip(traced.outputs, outputs, strict=True):
        if not _fits(output, node, bound, exact=True):
            return None
    return [node for node in bound.values() if isinstance(node, fx.Node) and node not in leaves]


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
