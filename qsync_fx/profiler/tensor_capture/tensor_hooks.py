"""Notes, in one run of a model, the tensors that its operators may round and the gates that noise may flip.

Invariant: the run computes what it computes without. Nothing is copied but what the model writes to later; of gates a byte an element is
kept.

Runs a graph node by node and hands operators to whoever wants to look at them, or to change them: adjustable ones, others by name.

Invariant: without a change it computes what the graph computes, to the bit. Bodies of higher-order operators (activation checkpointing) are
run in their place, once: what a backward pass would compute again is kept.
"""

from __future__ import annotations

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

Call = Callable[[Sequence[Any]], Any]
Tap = Callable[[Operator, list[Any], Call], Any]
"""Called with an operator, its arguments in the order of the schema, and what computes it of them; returns its result."""


Watch = Callable[[fx.Node, Sequence[Any], dict[str, Any], Callable[[], Any]], Any]
"""Called with any other node, its arguments, and what computes it; returns its result."""


def tapped(tap: Tap, watch: Watch | None = None, also: Container[str] = ()) -> Run:
    """Returns what runs a graph with `tap` at its adjustable operators and those with the ids `also`, and `watch` at all other calls."""
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
            # Arguments behind a star have no place: they go by name.
            by_name = {a.name for a in target._schema.arguments if a.kwarg_only}
            pairs = list(zip(names, values, strict=True))
            args = tuple(v for k, v in pairs if k not in by_name)
            return called(target, args, {k: v for k, v in pairs if k in by_name})

        return self._tap(Operator(self._precision_graph, n), list(inputs.values()), call)

    def _taps(self, note: OperatorInfo) -> bool:
        return note.kind is Kind.ADJUSTABLE or str(note.id) in self._also


OUTPUT = -1
"""The place of an operator's result."""


@dataclass(frozen=True)
class Tapped:
    """A tensor of an operator, and where its gradient is."""

    value: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        operator: its id.
        row: what the operator table says of it.
        tensors: what it may round, by place; of one that follows another all that it reads and gives.
        given: its arguments, without their history.
        call: computes it.
        converted: the positions of the arguments that a plan converts.
    """

    operator: str
    row: OperatorRow
    tensors: Mapping[Place, Tapped]
    given: Sequence[Any]
    call: Call
    converted: tuple[int, ...]


@dataclass
class Taps:
    """
    Args:
        wanted: the places to note, by operator.
        following: the operators to note whole.

    Attributes:
        seen: the calls of operators.
        gates: what noise may flip.
        unrecorded: the operators that ran where the model records no gradients.
    """

    wanted: Mapping[str, set[Place]]
    following: Container[str] = ()
    seen: list[OperatorCall] = field(default_factory=list)
    gates: list[NonsmoothOperator] = field(default_factory=list)
    unrecorded: set[str] = field(default_factory=set)
    _memory: dict[PrecisionGraph, AliasSets] = field(default_factory=dict)
    _given: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def edges(self) -> dict[tuple[int, Place], GradientEdge]:
        """Where the gradient of each tensor is, by the number of the call and the tensor's place."""
        return {
            (index, place): t.edge
            for index, visited in enumerate(self.seen)
            for place, t in visited.tensors.items()
        }

    def tap(self, operator: Operator, argument: list[Any], call: Call) -> Any:
        """Computes an operator, as `tapped.Tap` says, on views of what it reads: gradients of these are of this reader alone."""
        name = str(operator.id)
        follows = name in self.following
        places = {OUTPUT, *_floats(argument)} if follows else self.wanted.get(name, set())
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
            branch = (
                value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            )
            put(branched, place, branch)
            tensors[place] = Tapped(_kept(branch, written), get_gradient_edge(branch))
        result = (
            self.watch(operator.node, branched, {}, lambda: call(branched))
            if follows
            else call(branched)
        )
        if OUTPUT in places and isinstance(result, Tensor):
            # Behind a view: some operators differentiate by their own result, and what that errs by there is found by running them.
            result = result if written else result.view_as(result)
            tensors[OUTPUT] = Tapped(_kept(result, written), get_gradient_edge(result))
        plain = [_plain(value, written) for value in argument]
        row = operator.row
        assert row is not None
        self._given[operator.node] = len(self.seen)
        self.seen.append(OperatorCall(name, row, tensors, plain, call, row.converted(plain)))
        if OUTPUT in tensors and not written:
            # A sum hands one gradient to all that it adds up: behind a view the operator's own is a tensor of its own.
            result = result.view_as(result)
        return result

    def watch(
        self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Computes any other node, as `tapped.Watch` says."""
        read = self._handed_on(node)
        matches = gate(node, args, kwargs)
        if matches is None:
            return call()
        x, places, rivals = matches
        reads = read if read is not None and rivals is None and self._is_result(x, read) else None
        entry = get_gradient_edge(x)
        numel = x.numel() if rivals is None else int(torch.count_nonzero(x.detach()))
        result = call()
        name = f"{len(self.gates)} {node.name}"  # the same in every process
        self.gates.append(
            NonsmoothOperator(name, entry, get_gradient_edge(result), numel, places, rivals, reads)
        )
        return result

    def _handed_on(self, node: fx.Node) -> int | None:
        """Returns the number of the call whose result a node reads, or what has only moved its values."""
        read = (
            self._given.get(node.args[0])
            if node.args and isinstance(node.args[0], fx.Node)
            else None
        )
        note = node_metadata.NOTE.get(node)
        if read is not None and note is not None and note.row is not None and note.row.moves:
            self._given[node] = read
        return read

    def _is_result(self, x: Tensor, call: int) -> bool:
        """Whether a tensor has the values of a call's result in their order."""
        noted = self.seen[call].tensors.get(OUTPUT)
        return (
            noted is not None
            and noted.value.numel() == x.numel()
            and torch.equal(noted.value.flatten(), x.detach().flatten())
        )

    def _written(self, operator: Operator) -> bool:
        """Whether the model writes to something that the operator reads or gives."""
        memory = self._memory.setdefault(operator.graph, AliasSets(operator.graph))
        node = operator.node
        return any(memory.of(used) & memory.written for used in (node, *node.all_input_nodes))


def put(argument: list[Any], place: Place, value: Tensor) -> None:
    """Puts a tensor at a place among the arguments of a call."""
    if isinstance(place, int):
        argument[place] = value
    else:
        argument[place[0]] = list(argument[place[0]])
        argument[place[0]][place[1]] = value


def _floats(argument: Sequence[Any]) -> list[Place]:
    result: list[Place] = []
    for index, value in enumerate(argument):
        items = enumerate(value) if isinstance(value, (list, tuple)) else ()
        result += [(index, item) for item, element in items if _is_float(element)]
        result += [index] if _is_float(value) else []
    return result


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _kept(value: Tensor, written: bool) -> Tensor:
    return value.detach().clone() if written else value.detach()


def _plain(value: Any, written: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item, written) for item in value]
    return _kept(value, written) if isinstance(value, Tensor) else value
