"""The precision DAG: a typed view over an fx.Graph.

Invariant: the fx.Graph is the only truth. Each node's value is `meta["val"]` (fake tensors), each operator's note is
a frozen `Note` (qsync_fx/graph/meta.py); a `PrecisionGraph` adds no state of its own beside the context of the compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from qsync_fx.devices import targeted
from qsync_fx.errors import PassError, PrecisionError
from qsync_fx.graph import meta
from qsync_fx.graph.nodes import Source, argument_at, arguments, source_of, target_name
from qsync_fx.graph.notes import Note, Rewritten
from qsync_fx.graph.values import describe, format_of
from qsync_fx.ops import Kind, OperatorRow
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.opid import Numbering, OpId
from qsync_fx.precision import Precision, precision
from qsync_fx.resolve import resolve

if TYPE_CHECKING:
    import networkx as nx

    from qsync_fx.graph.costs.total import Costing


class Operator:
    """A handle on one operator of the graph; it reads and writes the node's note.

    Args:
        note: what the handle shows in place of the node's note: a decision that is another plan's.
    """

    def __init__(self, graph: PrecisionGraph, node: fx.Node, note: Note | None = None) -> None:
        self.graph, self.node, self._note = graph, node, note

    @property
    def note(self) -> Note:
        note: Note = self._note or meta.NOTE[self.node]
        return note

    @property
    def id(self) -> OpId:
        return self.note.id

    @property
    def kind(self) -> Kind:
        return self.note.kind

    @property
    def precision(self) -> Precision | None:
        return self.note.precision

    @property
    def output(self) -> Precision | None:
        return self.note.output

    @property
    def reason(self) -> str:
        by, reason = self.note.by, self.note.reason
        if self.note.computed is not None:
            reason = f"{reason}; {self.note.computed}" if reason else str(self.note.computed)
        return f"{self.note.how} by {by}; {reason}" if by and reason else reason

    @property
    def row(self) -> OperatorRow | None:
        return self.note.row

    @property
    def held(self) -> Precision | None:
        """The format that the model itself holds the result in; None in an autocast region that gives way to a plan."""
        region = isinstance(self.note.autocast, Precision) and not self.graph.context.automatic
        return None if region else format_of(self.graph.value(self.node))

    @property
    def refused(self) -> str | None:
        """Why no operator of ours takes the place of this one; None where one does, and for rows that never have one."""
        row = self.row
        if row is None or not row.scaled:
            return None
        given = tuple(arguments(self.node).values())
        if not all(isinstance(argument_at(given, at), fx.Node) for at in row.scaled):
            return "an operand is no tensor"
        lowering = self.graph.context.lowerings.get(row.name)
        return lowering.refuses(self.node) if lowering is not None else f"{row.name} has no lowering"

    @property
    def source(self) -> Source | None:
        return source_of(self.node)

    @property
    def where(self) -> str:
        """The operator's id and its line in the user's model, for error messages."""
        source = self.source
        return f"operator {self.id}" + (f", {source}: {source.code}" if source else "")

    def update(self, **changes: Any) -> None:
        """Replaces fields of the note."""
        meta.NOTE[self.node] = dataclasses.replace(self.note, **changes)

    def assign(self, name: str | Precision, reason: str) -> None:
        """Gives the operator a precision, for a reason that reports show; it holds against the plan.

        Raises:
            PrecisionError: the precision is unknown, or the operator is not adjustable.
        """
        wanted = precision(name)
        if self.kind is not Kind.ADJUSTABLE:
            raise PrecisionError(
                f"{self.id} is {self.kind}: no pass can assign {wanted} to it",
                where=self.where,
                do='choose among graph.operators(kind="adjustable"); dependent operators follow their inputs',
            )
        self.decide(wanted, reason, pinned=True)

    def decide(self, planned: Precision, reason: str, pinned: bool = False) -> None:
        """Notes what is planned, what the operator and the device make of it, and why."""
        row = self.row
        assert row is not None, "adjustable operators have rows"
        context = self.graph.context
        runs, but = resolve(row, planned, context.device, context.options.exact, self.held, self.refused)
        reason = f"{reason}; {but}" if but else reason
        self.update(planned=planned, precision=runs, reason=reason, instead=but, pinned=pinned)

    def __repr__(self) -> str:
        return f"<Operator {self.id} {self.kind} {self.precision or 'unassigned'}>"


@dataclass(frozen=True)
class Context:
    """What a compilation knows beside the graph.

    Attributes:
        device: where the graph runs.
        options: the backend's options.
        plan: the plan in force: the user's, or the uniform one that the options ask for.
        automatic: whether neither was given, so that the model's own autocast regions decide where there are any.
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
    automatic: bool = False
    ambient: tuple[bool, torch.dtype] | None = None
    training: bool = True
    complete: bool = True
    seen: frozenset[OpId] = frozenset()
    modules: frozenset[str] | None = None
    lowerings: Mapping[str, Any] = field(default_factory=dict, compare=False)

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
            with _quiet(self.context, meta.REGION.get(node) or (False, None)):
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


class _quiet:
    """Runs operators on fake tensors: no gradients, no autocast but that of a node's own region, the graph's own fake mode."""

    def __init__(self, context: Context, region: tuple[bool, torch.dtype | None]) -> None:
        enabled, dtype = region
        self._contexts: list[Any] = [torch.no_grad(), torch.autocast(context.device.type, dtype, enabled)]
        if context.fake_mode is not None:
            # Without the Python dispatcher operators that are composed of others take no symbolic sizes.
            self._contexts += [enable_python_dispatcher(), context.fake_mode]
            if context.fake_mode.shape_env is not None:
                self._contexts.append(context.fake_mode.shape_env.ignore_fresh_unbacked_symbols())

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)
