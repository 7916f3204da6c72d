"""Taps on the operators of a running graph, and a recorder of their tensors and gates.

`tapped` interprets a graph node by node. Bodies of higher-order operators (activation
checkpointing) are inlined and run once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import AliasSets
from qsync_fx.graph.fx_utils import argument_at, filled
from qsync_fx.graph.graph import Operator, PrecisionGraph
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.ops.spec import Kind, OperatorRow, Place
from qsync_fx.profiler.tensor_capture.graph_capture import Run, called
from qsync_fx.profiler.tensor_capture.nonsmooth_ops import NonsmoothOperator, gate
from qsync_fx.torch_internals import tree_map_only

Call = Callable[[Sequence[Any]], Any]
Tap = Callable[[Operator, list[Any], Call], Any]
"""Receives an operator, its arguments in schema order, and its function; returns the result."""


Watch = Callable[[fx.Node, Sequence[Any], dict[str, Any], Callable[[], Any]], Any]
"""Receives any other node, its arguments and its function; returns the result."""


def tapped(tap: Tap, watch: Watch | None = None, also: Container[str] = ()) -> Run:
    """Return a runner with `tap` at adjustable and `also` operators, `watch` at other calls."""
    return lambda part, inputs: _Tapped(part.graph, tap, watch, also).run(*inputs)


class _Tapped(fx.Interpreter):
    def __init__(
        self, graph: PrecisionGraph, tap: Tap, watch: Watch | None, also: Container[str]
    ) -> None:
        super().__init__(graph.module)
        self._precision_graph, self._tap, self._watch, self._also = graph, tap, watch, also

    def run_node(self, n: fx.Node) -> Any:
        if bodies := node_metadata.bodies(n):
            args, _ = self.fetch_args_kwargs_from_env(n)
            return _Tapped(bodies[0], self._tap, self._watch, self._also).run(*args[1:])
        note = node_metadata.NOTE.get(n)
        if note is None or note.row is None or note.precision is None or not self._taps(note):
            if self._watch is None or n.op != "call_function":
                return super().run_node(n)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self._watch(n, args, kwargs, lambda: super(_Tapped, self).run_node(n))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        inputs = filled(target, args, kwargs)
        names = list(inputs)

        def call(values: Sequence[Any]) -> Any:
            # Keyword-only arguments have no position.
            by_name = {a.name for a in target._schema.arguments if a.kwarg_only}
            pairs = list(zip(names, values, strict=True))
            args = tuple(v for k, v in pairs if k not in by_name)
            return called(target, args, {k: v for k, v in pairs if k in by_name})

        return self._tap(Operator(self._precision_graph, n), list(inputs.values()), call)

    def _taps(self, note: OperatorInfo) -> bool:
        return note.kind is Kind.ADJUSTABLE or str(note.id) in self._also


OUTPUT = -1
"""Place of an operator's result."""


@dataclass(frozen=True)
class Tapped:
    value: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        arguments: its arguments, detached.
        tensors: tensors it may round, by place; for a follower all inputs and the result.
        converted: indices of the arguments that a plan converts.
    """

    operator: str
    row: OperatorRow
    tensors: Mapping[Place, Tapped]
    arguments: Sequence[Any]
    call: Call
    converted: tuple[int, ...]


@dataclass
class Taps:
    """Recorder of operator calls and gates in one run; copies tensors that are mutated later.

    Calls are recorded at the places that are `wanted`, and completely for `following` operators.
    `unrecorded` operators ran with autograd disabled.
    """

    wanted: Mapping[str, set[Place]]
    following: Container[str] = ()
    calls: list[OperatorCall] = field(default_factory=list)
    gates: list[NonsmoothOperator] = field(default_factory=list)
    unrecorded: set[str] = field(default_factory=set)
    _memory: dict[PrecisionGraph, AliasSets] = field(default_factory=dict)
    _call_of_node: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def edges(self) -> dict[tuple[int, Place], GradientEdge]:
        """Edge of each tensor's gradient, by the index of the call and the place."""
        return {
            (index, place): tapped.edge
            for index, visited in enumerate(self.calls)
            for place, tapped in visited.tensors.items()
        }

    def tap(self, operator: Operator, argument: list[Any], call: Call) -> Any:
        """Run and record an operator on views, whose gradients come from this reader alone."""
        name = str(operator.id)
        follows = name in self.following
        places = self.wanted.get(name, set())
        if follows:
            places = {OUTPUT, *_floats(argument)}
        if not places:
            return call(argument)
        if not torch.is_grad_enabled():
            if not follows:
                self.unrecorded.add(name)
            return call(argument)
        written = self._written(operator)
        branched, tensors = list(argument), {}
        for place in places - {OUTPUT}:
            value = argument_at(argument, place)
            if value.requires_grad:
                branch = value.view_as(value)
            else:
                branch = value.detach().requires_grad_()
            put(branched, place, branch)
            tensors[place] = Tapped(_detached(branch, written), get_gradient_edge(branch))
        if follows:
            result = self.watch(operator.node, branched, {}, lambda: call(branched))
        else:
            result = call(branched)
        if OUTPUT in places and isinstance(result, Tensor):
            # A view, since some backward passes use the result; errors there are measured by
            # running it.
            if not written:
                result = result.view_as(result)
            tensors[OUTPUT] = Tapped(_detached(result, written), get_gradient_edge(result))
        plain = tree_map_only(Tensor, functools.partial(_detached, written=written), argument)
        row = operator.row
        assert row is not None
        self._call_of_node[operator.node] = len(self.calls)
        self.calls.append(OperatorCall(name, row, tensors, plain, call, row.converted(plain)))
        if OUTPUT in tensors and not written:
            # An addition passes one gradient tensor to all addends; a view gives the operator its
            # own.
            result = result.view_as(result)
        return result

    def watch(
        self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Run any other node and record it if it is a gate, as a `Watch`."""
        read = self._handed_on(node)
        matches = gate(node, args, kwargs)
        if matches is None:
            return call()
        x, places, rivals = matches
        if read is not None and (rivals is not None or not self._is_result(x, read)):
            read = None
        entry, numel = get_gradient_edge(x), x.numel()
        if rivals is not None:
            numel = int(torch.count_nonzero(x.detach()))
        result = call()
        name = f"{len(self.gates)} {node.name}"  # equal in every process
        self.gates.append(
            NonsmoothOperator(name, entry, get_gradient_edge(result), numel, places, rivals, read)
        )
        return result

    def _handed_on(self, node: fx.Node) -> int | None:
        """Return the index of the call whose result a node reads, possibly moved."""
        source = next(iter(node.args), None)
        read = self._call_of_node.get(source) if isinstance(source, fx.Node) else None
        note = node_metadata.NOTE.get(node)
        if read is not None and note is not None and note.row is not None and note.row.moves:
            self._call_of_node[node] = read
        return read

    def _is_result(self, x: Tensor, call: int) -> bool:
        """Return whether a tensor has the values of a call's result in the same order."""
        noted = self.calls[call].tensors.get(OUTPUT)
        if noted is None or noted.value.numel() != x.numel():
            return False
        return torch.equal(noted.value.flatten(), x.detach().flatten())

    def _written(self, operator: Operator) -> bool:
        memory = self._memory.setdefault(operator.graph, AliasSets(operator.graph))
        node = operator.node
        return any(memory.of(used) & memory.written for used in (node, *node.all_input_nodes))


def put(argument: list[Any], place: Place, value: Tensor) -> None:
    if isinstance(place, int):
        argument[place] = value
    else:
        argument[place[0]] = list(argument[place[0]])
        argument[place[0]][place[1]] = value


def _floats(argument: Sequence[Any]) -> list[Place]:
    result: list[Place] = []
    for index, value in enumerate(argument):
        if is_floating(value):
            result.append(index)
        elif isinstance(value, (list, tuple)):
            result += [(index, item) for item, t in enumerate(value) if is_floating(t)]
    return result


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _detached(value: Tensor, written: bool) -> Tensor:
    value = value.detach()
    return value.clone() if written else value
