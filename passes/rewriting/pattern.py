"""Patterns of rewrites: functions in plain torch, traced to the graphs that they may have.

The graph of a function depends on the sizes of its inputs. The function is traced with small
tensors of several ranks; the different sequences of operators are its shapes. They find candidate
sites, and a trace with the values of a site confirms it (`match.py`).

Invariant: an argument without a default matches any tensor; an argument with a default matches any
value at the positions where the default occurs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qsync_fx.errors import OptionError, PassError
from qsync_fx.graph import Context, PrecisionGraph
from qsync_fx.graph.fx_utils import arguments
from qsync_fx.options import Options
from qsync_fx.passes.tracing.graph_cleanup import without_needless_writes
from qsync_fx.passes.tracing.retrace import pre_dispatch
from qsync_fx.plan import Plan


@dataclass(frozen=True)
class TracedPattern:
    """A traced function.

    Attributes:
        module: the graph; its placeholders are the arguments, then `tensors`.
        tensors: the tensors that the function captures, in order.
        outputs: the nodes that the function returns, flattened.
    """

    module: fx.GraphModule
    tensors: tuple[Tensor, ...]
    outputs: tuple[Any, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]


class Untraceable(Exception):
    """Raised for a function without a graph; the text has the reason."""


def trace(
    function: Callable[..., Any], values: Sequence[Any], recorded: bool = False
) -> TracedPattern:
    """Trace a function of fake tensors and symbolic numbers under the active fake mode.

    Args:
        function: accepts positional arguments and returns tensors.
        values: its arguments.
        recorded: whether to record the backward pass, to detect custom autograd functions.

    Raises:
        Untraceable: the function fails on these values, or a graph cannot express it.
    """
    mode = active_fake_mode()
    assert mode is not None, "tracing needs a fake mode"
    lift = _Lift()
    inputs = [_recording(value) for value in values] if recorded else values

    def run(*args: Any) -> Any:
        lift.stand_ins = dict(zip(map(id, lift.tensors), args[len(values) :], strict=True))
        with lift:
            returned = function(*args[: len(values)])
        lift.outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        _refuse_autograd_functions(lift.outputs)
        return tuple(lift.outputs)

    while True:
        available = len(lift.tensors)
        stand_ins = [mode.from_tensor(tensor, static_shapes=True) for tensor in lift.tensors]
        try:
            module = pre_dispatch(run, [*inputs, *stand_ins])
        except Untraceable:
            raise
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise Untraceable(f"{type(error).__name__}: {first_line}") from error
        if available == len(lift.tensors):  # else the next trace has the captured tensors as inputs
            return _checked(module, lift)


def trace_call(
    function: Callable[..., Any], value: Mapping[str, Any], recorded: bool = False
) -> TracedPattern:
    """Trace a call by name.

    Tensors and symbolic numbers, also inside lists, become inputs of the graph; other values stay
    constant.
    """
    leaves, spec = pytree.tree_flatten(dict(value))
    symbolic = (Tensor, torch.SymInt, torch.SymFloat)
    inputs = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, symbolic)}

    def run(*values: Any) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(inputs, values, strict=True))
        return function(**pytree.tree_unflatten(list(filled.values()), spec))

    return trace(run, list(inputs.values()), recorded)


def _checked(module: fx.GraphModule, lift: _Lift) -> TracedPattern:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    outputs = tuple(pytree.tree_leaves(output.args[0]))
    all_tensors = all(isinstance(value, Tensor) for value in lift.outputs)
    if not all_tensors or len(outputs) != len(lift.outputs):
        kinds = ", ".join(type(value).__name__ for value in lift.outputs) or "nothing"
        raise Untraceable(f"it returns {kinds}, where a tensor or a tuple of tensors is expected")
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target)), FakeTensor):
            message = "it computes a value outside torch's dispatcher, where tracing cannot see it"
            raise Untraceable(message)
    return TracedPattern(module, tuple(lift.tensors), outputs)


@dataclass
class _Lift(TorchFunctionMode):
    """Mode that replaces captured tensors by graph inputs and records new ones."""

    tensors: list[Tensor] = field(default_factory=list)
    stand_ins: dict[int, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in self.stand_ins:
            if value.grad_fn is not None:
                raise Untraceable(
                    "it refers to a tensor that was computed with gradients; refer to the inputs "
                    "of that computation"
                )
            mode = active_fake_mode()
            assert mode is not None
            self.tensors.append(value)
            self.stand_ins[id(value)] = mode.from_tensor(value, static_shapes=True)
        return self.stand_ins[id(value)]


def _recording(value: Any) -> Any:
    """Return an alias whose gradient is recorded if grad mode is on.

    The autograd graph then shows the functions that are called.
    """
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
    """A function whose computation a rewrite finds.

    Attributes:
        function: the function in plain torch.
        tensors: names of the tensor arguments.
        literals: names and defaults of the other arguments.
        example: tensors that the function accepts; None to try several ranks.
    """

    function: Callable[..., Any]
    tensors: tuple[str, ...]
    literals: Mapping[str, Any]
    example: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], example: tuple[Tensor, ...] | None) -> Pattern:
        """Return the pattern of a function; raise `OptionError` if its signature is unsuitable."""
        inputs = inspect.signature(function).parameters.values()
        name = f"the pattern {function.__name__!r}"
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inputs):
            message, do = f"{name} has *arguments", "name each tensor that it reads"
            raise OptionError(message, where=_place(function), do=do)
        tensors = tuple(p.name for p in inputs if p.default is p.empty)
        if not tensors or (example is not None and len(example) != len(tensors)):
            number = f"{len(tensors)} arguments for tensors"
            if example is not None:
                number = f"an example of {len(example)} tensors and {number}"
            do = "write an argument without a default, and an example, for each tensor"
            raise OptionError(f"{name} has {number}", where=_place(function), do=do)
        literals = {p.name: p.default for p in inputs if p.default is not p.empty}
        return cls(function, tensors, literals, example)

    def with_values(self, value: Mapping[str, Any], context: Context) -> TracedPattern:
        """Trace the function with the given arguments, and normalize the trace."""
        traced = trace_call(self.function, value)
        without_needless_writes(PrecisionGraph(traced.module, list(value.values()), context))
        (output,) = (node for node in traced.module.graph.nodes if node.op == "output")
        outputs = tuple(pytree.tree_leaves(output.args[0]))
        return TracedPattern(traced.module, traced.tensors, outputs)

    @functools.cached_property
    def shapes(self) -> tuple[PatternShape, ...]:
        """The graphs of the function; raise `PassError` if no example could be traced."""
        result: dict[tuple[str, ...], PatternShape] = {}
        reason = ""
        with FakeTensorMode() as mode, _quiet_failures():
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
            raise PassError(
                f"the pattern {self.function.__name__!r} cannot be traced: {reason}",
                where=_place(self.function),
                do="use torch operators on its arguments; if it needs tensors of certain sizes or "
                "dtypes, pass examples: rewrite(example=(torch.empty(2, 3), ...))",
            )
        return tuple(result.values())

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
    """One graph of a pattern.

    Attributes:
        traced: the graph.
        literals: for each argument with a default, the positions where it occurs: nodes and names
            of their arguments.
    """

    traced: TracedPattern
    literals: Mapping[str, tuple[tuple[fx.Node, str], ...]]

    @classmethod
    def of(cls, pattern: Pattern, traced: TracedPattern) -> PatternShape:
        """Return the shape of a trace; raise `PassError` if it cannot serve as a pattern."""
        where, name = _place(pattern.function), f"the pattern {pattern.function.__name__!r}"
        if traced.tensors:
            message = f"{name} refers to a tensor that it is not given"
            raise PassError(message, where=where, do="make it an argument")
        for argument, node in zip(pattern.tensors, traced.inputs, strict=False):
            if not node.users:
                message = f"{name} does not read {argument!r}"
                raise PassError(message, where=where, do="remove the argument")
        if any(output.op != "call_function" for output in traced.outputs):
            message = f"{name} returns an argument"
            raise PassError(message, where=where, do="return a computed tensor")
        positions = {}
        for argument, default in pattern.literals.items():
            positions[argument] = tuple(_where(traced, default))
            if not positions[argument]:
                message = (
                    f"the argument {argument!r} of {name} does not reach any operator unchanged"
                )
                do = "pass it to an operator unchanged, or give it no default if it is a tensor"
                raise PassError(message, where=where, do=do)
        return cls(traced, positions)


def operands(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name if its operator has names, with defaults filled in."""
    if isinstance(node.target, torch._ops.OpOverload):
        return arguments(node)
    return {str(index): value for index, value in enumerate((*node.args, *node.kwargs.values()))}


def _where(traced: TracedPattern, literal: Any) -> Iterator[tuple[fx.Node, str]]:
    for node in traced.module.graph.nodes:
        if node.op == "call_function":
            positions = operands(node).items()
            yield from ((node, name) for name, value in positions if same(value, literal))


def same(item: Any, other: Any) -> bool:
    """Return whether two non-tensor arguments are equal.

    `True` differs from 1, and symbolic sizes compare by expression.
    """
    if isinstance(item, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(item) == len(other) and all(map(same, item, other))
    item, other = (getattr(value, "meta", {}).get("val", value) for value in (item, other))
    symbolic = (torch.SymInt, torch.SymFloat)
    if isinstance(item, symbolic) and isinstance(other, symbolic):
        return bool(item.node.expr == other.node.expr)
    return type(item) is type(other) and bool(item == other)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    return f"{code.co_filename}:{code.co_firstlineno}"


@contextlib.contextmanager
def _quiet_failures() -> Iterator[None]:
    """Suppress torch's logs about examples that cannot be traced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def refuse(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)
