"""Notes, in one run of a model, the tensors that its operators may round and the gates that noise may flip.

Invariant: the run computes what it computes without. Nothing is copied but what the model writes to later; of gates a byte an element is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.graph.effects.memory import Memory
from qsync_fx.graph.nodes import argument_at
from qsync_fx.ops import Place
from qsync_fx.profiling.statistics.gates import Gate, gate
from qsync_fx.profiling.statistics.tapped import Call

OUTPUT = -1
"""The place of an operator's result."""


@dataclass(frozen=True)
class Tapped:
    """A tensor of an operator, and where its gradient is."""

    value: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class Seen:
    """One call of an operator.

    Attributes:
        operator: its id.
        tensors: what it may round, by place.
        given: its arguments, without their history.
        call: computes it.
        converted: the positions of the arguments that a plan converts.
    """

    operator: str
    tensors: Mapping[Place, Tapped]
    given: Sequence[Any]
    call: Call
    converted: tuple[int, ...]


@dataclass
class Taps:
    """
    Args:
        wanted: the places to note, by operator.

    Attributes:
        seen: the calls of operators.
        gates: what noise may flip.
        unrecorded: the operators that ran where the model records no gradients.
    """

    wanted: Mapping[str, set[Place]]
    seen: list[Seen] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    unrecorded: set[str] = field(default_factory=set)
    _memory: dict[PrecisionGraph, Memory] = field(default_factory=dict)

    @property
    def edges(self) -> dict[tuple[int, Place], GradientEdge]:
        """Where the gradient of each tensor is, by the number of the call and the tensor's place."""
        return {(at, place): t.edge for at, seen in enumerate(self.seen) for place, t in seen.tensors.items()}

    def tap(self, operator: Operator, given: list[Any], call: Call) -> Any:
        """Computes an operator, as `tapped.Tap` says, on views of what it reads: gradients of these are of this reader alone."""
        name = str(operator.id)
        places = self.wanted.get(name, set())
        if not places:
            return call(given)
        if not torch.is_grad_enabled():
            self.unrecorded.add(name)
            return call(given)
        written = self._written(operator)
        branched, tensors = list(given), {}
        for place in places - {OUTPUT}:
            value = argument_at(given, place)
            branch = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            put(branched, place, branch)
            tensors[place] = Tapped(_kept(branch, written), get_gradient_edge(branch))
        result = call(branched)
        if OUTPUT in places and isinstance(result, Tensor):
            tensors[OUTPUT] = Tapped(_kept(result, written), get_gradient_edge(result))
        plain = [_plain(value, written) for value in given]
        row = operator.row
        assert row is not None
        self.seen.append(Seen(name, tensors, plain, call, row.converted(plain)))
        if OUTPUT in tensors and not written:
            # A sum hands one gradient to all that it adds up: behind a view the operator's own is a tensor of its own.
            result = result.view_as(result)
        return result

    def watch(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Computes any other node, as `tapped.Watch` says."""
        found = gate(node, args, kwargs)
        if found is None:
            return call()
        x, places, rivals = found
        entry = get_gradient_edge(x)
        numel = x.numel() if rivals is None else int(torch.count_nonzero(x.detach()))
        result = call()
        self.gates.append(
            Gate(f"{id(node.graph)} {node.name}", entry, get_gradient_edge(result), numel, places, rivals)
        )
        return result

    def _written(self, operator: Operator) -> bool:
        """Whether the model writes to something that the operator reads or gives."""
        memory = self._memory.setdefault(operator.graph, Memory(operator.graph))
        node = operator.node
        return any(memory.of(used) & memory.written for used in (node, *node.all_input_nodes))


def put(given: list[Any], place: Place, value: Tensor) -> None:
    """Puts a tensor at a place among the arguments of a call."""
    if isinstance(place, int):
        given[place] = value
    else:
        given[place[0]] = list(given[place[0]])
        given[place[0]][place[1]] = value


def _kept(value: Tensor, written: bool) -> Tensor:
    return value.detach().clone() if written else value.detach()


def _plain(value: Any, written: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item, written) for item in value]
    return _kept(value, written) if isinstance(value, Tensor) else value
