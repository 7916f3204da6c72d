"""The precision DAG: a typed view over an fx.Graph.

Invariant: the fx.Graph is the only truth. Each node's value is `meta["val"]` (fake tensors), each operator's note is
a frozen `Note` (qsync_fx/graph/meta.py); a `PrecisionGraph` adds no state of its own beside the context of the compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from qsync_fx.devices import targeted
from qsync_fx.errors import PassError
from qsync_fx.graph import meta
from qsync_fx.graph.fake import FakeRun
from qsync_fx.graph.nodes import target_name
from qsync_fx.graph.notes import Rewritten
from qsync_fx.graph.operator import Operator
from qsync_fx.graph.values import describe
from qsync_fx.ops import Kind
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.opid import Numbering, OpId

if TYPE_CHECKING:
    import networkx as nx

    from qsync_fx.graph.costs.total import Costing


@dataclass(frozen=True)
class Context:
    """What a compilation knows beside the graph.

    Attributes:
        device: where the graph runs.
        options: the backend's options.
        plan: the plan in force: the user's, or the uniform one that the options ask for.
        fake_mode: the mode of every fake tensor in the graph; None when the graph holds no tensors.
        ambient: (enabled, dtype) of an autocast region around the whole graph; None when there is none.
        training: whether gradients are recorded.
        complete: whether the graph holds the whole model (no graph break, no split by DDP).
        seen: operators of earlier graphs of the model, which the plan may mean too.
        modules: the paths of the model's modules; None where they are not known.
        lowerings: how adjustable operators become `qsync::` operators, by row name.
    """

    device: torch.device
    options: Options
    plan: Plan
    fake_mode: FakeTensorMode | None
    ambient: tuple[bool, torch.dtype] | None = None
    training: bool = True
    complete: bool = True
    seen: frozenset[OpId] = frozenset()
    modules: frozenset[str] | None = None
    lowerings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def automatic(self) -> bool:
        """Whether neither a plan nor a precision was asked for, so that the model's own autocast regions decide where there are any."""
        return self.options.automatic

    def there(self) -> AbstractContextManager[None]:
        """Lets devices count as the target, if the options name one: whoever asks what runs where asks within."""
        return targeted(self.options.target, self.device)


class PrecisionGraph:
    """One graph on its way through the passes.

    Attributes:
        module: the graph and the tensors it refers to. A pass may change it in place or replace it.
        inputs: example inputs, fake tensors and SymInts.
        outputs: the type of each output, as Dynamo expects it; None for what is no tensor, or where Dynamo does not say.
        context: what the compilation knows beside the graph.
        parent: the graph that this one is the body of a higher-order operator in; None at the top.
        written: a copy from before casts are inserted: the graph as the model, and the passes of its user, wrote it. None until it is
            classified, and for bodies.
        numbers: of its operators; those in bodies are numbered with it.
    """

    def __init__(
        self, module: fx.GraphModule, inputs: list[Any], context: Context, parent: PrecisionGraph | None = None
    ) -> None:
        self.module, self.inputs, self.context, self.parent = module, inputs, context, parent
        self.outputs = self.output_types()
        self.unknown: dict[str, int] = {}
        self.written: PrecisionGraph | None = None
        self.numbers = Numbering()
        self.rewritten: dict[str, Rewritten] = {}

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @property
    def whole(self) -> PrecisionGraph:
        """The graph at the top, of which this one is a body, or a body of a body; itself where it is no body."""
        return self if self.parent is None else self.parent.whole

    @property
    def where(self) -> str:
        """Where the graph stands in the user's model, for error messages."""
        first = next(iter(self.operators()), None)
        return f"the graph that starts with {first.where}" if first is not None else "a graph without operators"

    def own_operators(self) -> list[Operator]:
        """Returns the operators of this graph alone, without those in bodies of higher-order operators."""
        return [Operator(self, node) for node in self.nodes if node in meta.NOTE]

    def operators(self, kind: Kind | str | None = None, pattern: str | None = None) -> list[Operator]:
        """Returns the operators, those in bodies of higher-order operators included, by kind and by pattern of their id."""
        wanted = Kind(kind) if kind is not None else None
        return [
            operator
            for graph in self.walk()
            for operator in graph.own_operators()
            if (wanted is None or operator.kind is wanted) and (pattern is None or operator.id.matches(pattern))
        ]

    def walk(self) -> Iterator[PrecisionGraph]:
        """Yields this graph and, depth first, the bodies of its higher-order operators that the passes rewrite."""
        yield self
        for node in self.nodes:
            for body in meta.bodies(node):
                yield from body.walk()

    def output_types(self) -> list[torch.dtype | None]:
        """Returns the type of each output as the graph is now; None for what is no tensor."""
        (output,) = (node for node in self.nodes if node.op == "output")
        values = (self.value(used) for used in pytree.tree_leaves(output.args))
        return [value.dtype if isinstance(value, torch.Tensor) else None for value in values]

    def dag(self) -> nx.MultiDiGraph:
        """Returns the operators and what flows between them as a value of networkx; see `qsync_fx.graph.costs.dag`.

        Raises:
            PassError: the graph has not been classified yet.
        """
        from qsync_fx.graph.costs.dag import precision_dag

        with self.context.there():
            return precision_dag(self.costing.flow)

    @functools.cached_property
    def costing(self) -> Costing:
        """What operators cost in each of their states."""
        from qsync_fx.graph.costs.flow import Flow
        from qsync_fx.graph.costs.total import Costing

        if self.written is None:
            raise PassError("the graph has no operators yet", do='ask after the pass "classify"')
        return Costing(Flow(self.written))

    def value(self, node: Any) -> Any:
        """Returns the fake value of a node; anything that is no node is its own value."""
        return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else node

    def propagate(self, node: fx.Node) -> None:
        """Computes a node's fake value anew from its arguments.

        Raises:
            PassError: the operator does not take these arguments.
        """
        value = self.computed(node)
        # Sizes that depend on values were named when the graph was traced; names that are given anew belong to nothing.
        node.meta["val"] = _sized_as(self.value(node), value) if node.meta.get("unbacked_bindings") else value

    def computed(self, node: fx.Node) -> Any:
        """Returns what a node makes of its arguments' fake values; raises as `propagate` does."""
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self.value)
        try:
            enabled, dtype = meta.REGION.get(node) or (False, None)
            region = torch.autocast(self.context.device.type, dtype, enabled)
            with FakeRun(self.context.fake_mode, torch.no_grad(), region):
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            where = Operator(self, node).where if node in meta.NOTE else f"node %{node.name}"
            shown = ", ".join(describe(self.value(a)) for a in node.args)
            raise PassError(
                f"{target_name(node)} does not take ({shown}): {error}",
                where=where,
                do="give it operands of matching formats",
            ) from error


def _sized_as(before: Any, now: Any) -> Any:
    """Returns values of the types of `now` and the sizes of `before`."""
    if isinstance(now, (list, tuple)):
        return type(now)(_sized_as(b, n) for b, n in zip(before, now, strict=True))
    return before.to(now.dtype) if isinstance(now, torch.Tensor) else before
