"""Patterns of rewrites: functions in plain torch, traced to the graphs that they may have.

The graph of a function depends on the sizes of its inputs. The function is traced with small
tensors of several ranks; the different sequences of operators are its shapes. They find candidate
sites, and a trace with the values of a site confirms it (`match.py`).

Invariant: an argument without a default matches any tensor; an argument with a default matches any
value at the positions where the default occurs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from qsync_fx.errors import OptionError, PassError
from qsync_fx.graph import Context, PrecisionGraph
from qsync_fx.graph.fx_utils import arguments
from qsync_fx.options import Options
from qsync_fx.passes.rewriting.trace_pattern import TracedPattern, Untraceable, trace_call
from qsync_fx.passes.tracing.graph_cleanup import without_needless_writes
from qsync_fx.plan import Plan

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
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inputs):
            raise OptionError(
                f"the pattern {function.__name__!r} has *arguments",
                where=_place(function),
                do="name each tensor that it reads",
            )
        tensors = tuple(p.name for p in inputs if p.default is p.empty)
        if not tensors or (example is not None and len(example) != len(tensors)):
            shown = f"an example of {len(example)} tensors and " if example is not None else ""
            raise OptionError(
                f"the pattern {function.__name__!r} has {shown}{len(tensors)} arguments for tensors",
                where=_place(function),
                do="write an argument without a default for each tensor that it reads, and as many examples",
            )
        return cls(
            function,
            tensors,
            {p.name: p.default for p in inputs if p.default is not p.empty},
            example,
        )

    def with_values(self, value: Mapping[str, Any], context: Context) -> TracedPattern:
        """Trace the function with the given arguments, and normalize the trace."""
        traced = trace_call(self.function, value)
        without_needless_writes(PrecisionGraph(traced.module, list(value.values()), context))
        (output,) = (node for node in traced.module.graph.nodes if node.op == "output")
        return TracedPattern(
            traced.module, traced.tensors, tuple(pytree.tree_leaves(output.args[0]))
        )

    @functools.cached_property
    def shapes(self) -> tuple[PatternShape, ...]:
        """The graphs of the function.

        Raises:
            PassError: no example could be traced.
        """
        result: dict[tuple[str, ...], PatternShape] = {}
        reason = ""
        with FakeTensorMode() as mode, _quiet_failures():
            context = Context(torch.device("cpu"), Options(), Plan(), mode)
            for tensors in self._examples(result):
                try:
                    traced = self.with_values(
                        {**dict(zip(self.tensors, tensors, strict=True)), **self.literals}, context
                    )
                except Untraceable as error:
                    reason = reason or str(error)
                    continue
                key = tuple(
                    str(node.target)
                    for node in traced.module.graph.nodes
                    if node.op == "call_function"
                )
                result.setdefault(key, PatternShape.of(self, traced))
        if not result:
            raise PassError(
                f"the pattern {self.function.__name__!r} cannot be traced: {reason}",
                where=_place(self.function),
                do="write it in torch operators on its arguments; if it takes tensors of certain sizes or types, show some: "
                "rewrite(example=(torch.empty(2, 3), ...))",
            )
        return tuple(result.values())

    def _examples(self, result: Mapping[Any, PatternShape]) -> Iterator[tuple[Tensor, ...]]:
        """Yield examples: all equal ranks, then mixed ranks until `result` is not empty."""
        if self.example is not None:
            yield tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                for tensor in self.example
            )
            return
        count = len(self.tensors)
        equal = [(rank,) * count for rank in (2, 3, 4, 1)]
        flat = (ranks for rank in (2, 3, 4) for ranks in itertools.product((rank, 1), repeat=count))
        every = itertools.product((2, 3, 4, 1), repeat=count)
        for index, ranks in enumerate(
            dict.fromkeys(
                itertools.chain(equal, itertools.islice(flat, 200), itertools.islice(every, 200))
            )
        ):
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
        where, name = _place(pattern.function), pattern.function.__name__
        unread = [
            argument
            for argument, node in zip(pattern.tensors, traced.inputs, strict=False)
            if not node.users
        ]
        if traced.tensors:
            raise PassError(
                f"the pattern {name!r} refers to a tensor that it is not given",
                where=where,
                do="make it an argument",
            )
        if unread:
            raise PassError(
                f"the pattern {name!r} does not read {unread[0]!r}",
                where=where,
                do="leave the argument out",
            )
        if any(output.op != "call_function" for output in traced.outputs):
            raise PassError(
                f"the pattern {name!r} returns an argument",
                where=where,
                do="return a computed tensor",
            )
        shown = {
            literal: tuple(_where(traced, default)) for literal, default in pattern.literals.items()
        }
        hidden = next((literal for literal, item in shown.items() if not item), None)
        if hidden is not None:
            raise PassError(
                f"the argument {hidden!r} of the pattern {name!r} does not reach any operator unchanged",
                where=where,
                do="hand it to an operator unchanged, or give it no default if it is a tensor",
            )
        return cls(traced, shown)


def operands(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name if its operator has names, with defaults filled in."""
    if isinstance(node.target, torch._ops.OpOverload):
        return arguments(node)
    return {str(index): value for index, value in enumerate((*node.args, *node.kwargs.values()))}


def _where(traced: TracedPattern, literal: Any) -> Iterator[tuple[fx.Node, str]]:
    for node in traced.module.graph.nodes:
        for name, value in operands(node).items() if node.op == "call_function" else ():
            if same(value, literal):
                yield node, name


def same(item: Any, other: Any) -> bool:
    """Return whether two non-tensor arguments are equal.

    `True` differs from 1, and symbolic sizes compare by expression.
    """
    if isinstance(item, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(item) == len(other) and all(map(same, item, other))
    item, other = (
        value.meta["val"] if isinstance(value, fx.Node) else value for value in (item, other)
    )
    if isinstance(item, (torch.SymInt, torch.SymFloat)) and isinstance(
        other, (torch.SymInt, torch.SymFloat)
    ):
        return bool(item.node.expr == other.node.expr)
    return type(item) is type(other) and bool(item == other)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


class _quiet_failures:
    """Suppress torch's logs about examples that cannot be traced."""

    def __enter__(self) -> None:
        self.logger = logging.getLogger("torch._subclasses.fake_tensor")
        self.logger.addFilter(self._refuse)

    def __exit__(self, *exc: object) -> None:
        self.logger.removeFilter(self._refuse)

    @staticmethod
    def _refuse(record: logging.LogRecord) -> bool:
        return False
