"""Weights that are quantized outside of the compiled graph and are inputs of it: the option "weights_once".

Invariant: a graph computes what it would have computed, had each weight been quantized in the pass that made its copy: by the same
operator, from the number that was drawn for that pass. So that number is an input, too, and where nothing was kept every bit is as without
the option. Gradients are those of the weight itself, which lowered operators take beside its copy.
"""

from __future__ import annotations

import operator as py_operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qsync_fx.backend.cuda.run import quantizing
from qsync_fx.backend.kept_weights import Made, copies
from qsync_fx.errors import PlanWarning
from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.effects.memory import Memory
from qsync_fx.graph.nodes import arguments
from qsync_fx.graph.weights import Origin, Origins
from qsync_fx.precision import precision

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Lifted:
    """What was taken out of a graph.

    Attributes:
        device: where the graph runs.
        draws: whether the graph is given the number that a pass draws.
        weights: which input of the graph each weight is, and how it is quantized.
        inputs: what the graph is given behind its own inputs, as fake tensors: that number, then values and scale of each weight.
    """

    device: torch.device
    draws: bool = False
    weights: tuple[tuple[int, Made], ...] = ()
    inputs: tuple[Any, ...] = ()

    def around(self, compiled: Compiled) -> Compiled:
        """Returns code that takes the graph's own inputs alone, for code that takes all of them."""
        if not self.weights:
            return compiled

        def run(*given: Any) -> Any:
            # Copies outlive the pass, and one that was made in inference mode could not be read in training.
            with torch.inference_mode(False), torch.no_grad():
                seed = self._seed()
                pairs = copies([(given[at], made) for at, made in self.weights], seed)
            return compiled(*given, *[seed] * self.draws, *(part for pair in pairs for part in pair))

        return run

    def _seed(self) -> Tensor:
        if self.draws:
            return torch.ops.qsync.draw.default(self.device)  # type: ignore[no-any-return]
        return torch.zeros([1], dtype=torch.int64, device=self.device)


def lift(graph: PrecisionGraph) -> Lifted:
    """Takes the quantization of weights out of a lowered graph, which gets inputs in its place; says what stays, and why."""
    found = list(_quantized_weights(graph))
    taken = [node for node, why in found if not why]
    _tell(graph, [(node, why) for node, why in found if why], bool(found))
    if not taken:
        return Lifted(graph.context.device)
    given = [node for node in graph.nodes if node.op == "placeholder"]
    weights = tuple((given.index(own["x"]), _made(own)) for own in map(arguments, taken))
    seed = arguments(taken[0])["seed"]
    draws = seed.target is torch.ops.qsync.draw.default
    added = _Inputs(graph, given[-1])
    if draws:
        added.instead_of([seed], f"{seed.name}_drawn", graph.value(seed))
    for node in taken:
        for at, (name, value) in enumerate(zip(("values", "scale"), graph.value(node), strict=True)):
            parts = [user for user in node.users if user.target is py_operator.getitem and user.args[1] == at]
            added.instead_of(parts, f"{node.name}_{name}", value)
        graph.graph.erase_node(node)
    graph.inputs = [*graph.inputs, *added.values]
    graph.module.recompile()
    return Lifted(graph.context.device, draws, weights, tuple(added.values))


@dataclass
class _Inputs:
    """Adds inputs to a graph, behind those that it has."""

    graph: PrecisionGraph
    last: fx.Node
    values: list[Any] = field(default_factory=list)

    def instead_of(self, nodes: list[fx.Node], name: str, value: Any) -> None:
        """Adds one that is read in place of nodes, which are erased."""
        with self.graph.graph.inserting_after(self.last):
            self.last = self.graph.graph.placeholder(name)
        self.last.target = self.last.name  # the name of an argument, of which there may be several
        self.last.meta["val"] = value
        # AOTAutograd asks each input where in the model it comes from.
        self.last._dynamo_source = None
        self.values.append(value)
        for node in nodes:
            node.replace_all_uses_with(self.last)
            self.graph.graph.erase_node(node)


def _made(own: dict[str, Any]) -> Made:
    return Made(own["stream"], own["fmt"], own["rounding"], tuple(own["keep"]))


def _quantized_weights(graph: PrecisionGraph) -> Iterator[tuple[fx.Node, str]]:
    """Yields the casts of weights to scaled formats, and why one stays where it is; "" where it does not."""
    origins, memory = Origins(graph), Memory(graph)
    for part in graph.walk():
        for node in part.graph.find_nodes(op="call_function", target=torch.ops.qsync.quantize.default):
            if origins.of(node.args[0]) is Origin.PARAMETER:
                inside = "it stands in what is checkpointed, and is computed again with that"
                yield node, inside if part is not graph else _obstacle(graph, node, memory)


def _obstacle(graph: PrecisionGraph, node: fx.Node, memory: Memory) -> str:
    own = arguments(node)
    weight, value = own["x"], graph.value(own["x"])
    if weight.op != "placeholder":
        return "it is computed from a parameter, or held by the graph"
    if memory.of(weight) & memory.written:
        return "the model itself writes to it"
    if any(type(size) is not int for size in (*value.shape, *value.stride())):
        return "its size is symbolic"
    if value.device.type == "cuda" and quantizing.fused(value, precision(own["fmt"])):
        return "no kernel quantizes it here, so that a compiler does it with what stands beside it"
    return ""


def _tell(graph: PrecisionGraph, left: list[tuple[fx.Node, str]], any_weights: bool) -> None:
    """Says what the option does not do."""
    if not any_weights and graph.operators("adjustable"):
        warnings.warn(
            f'the option "weights_once" has no effect on {graph.where}: none of its weights is quantized. It is for int8 and fp8',
            PlanWarning,
            stacklevel=2,
        )
    if left:
        of = sorted({f"{meta.cast_source(node).name}: {why}" for node, why in left})
        warnings.warn(
            f'the option "weights_once" leaves {len(left)} weights of {graph.where} to be quantized in each pass: {"; ".join(of[:3])}'
            f"{'; and so on' if len(of) > 3 else ''}",
            PlanWarning,
            stacklevel=2,
        )
