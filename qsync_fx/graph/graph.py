"""The precision graph: a typed view over an fx.Graph, with handles on its operators.

Invariant: the fx.Graph is the only source of truth. A node's `meta["val"]` is its fake value, and a
frozen `OperatorInfo` (node_metadata.py) has the facts and decisions about an operator.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from qsync_fx.devices.format_support import (
    ANY,
    capability,
    is_gpu,
    resolve,
    row_on,
    support,
    targeted,
)
from qsync_fx.errors import PassError, PrecisionError
from qsync_fx.formats import FP32, Precision, precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import (
    Source,
    argument_at,
    arguments,
    describe,
    fake_run,
    format_of,
    source_of,
    target_name,
)
from qsync_fx.graph.node_metadata import OperatorInfo, Rewritten
from qsync_fx.ops.spec import Kind, OperatorRow
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import Numbering, OpId
from qsync_fx.plan.plan import Plan
from qsync_fx.torch_internals import FakeTensorMode, _LazyGraphModule, tree_leaves

if TYPE_CHECKING:
    from qsync_fx.graph.operator_costs import Costing


class Operator:
    """Handle on one operator of a graph; it reads and writes the node's `OperatorInfo`.

    `note` overrides the node's `OperatorInfo`, to show the decision of another plan.
    """

    def __init__(
        self, graph: PrecisionGraph, node: fx.Node, note: OperatorInfo | None = None
    ) -> None:
        self.graph, self.node, self._note = graph, node, note

    @property
    def note(self) -> OperatorInfo:
        return self._note or node_metadata.NOTE[self.node]

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
        note = self.note
        parts = list(filter(None, (note.reason, str(note.computed or ""))))
        if note.by and parts:
            parts.insert(0, f"{note.change} by {note.by}")
        return "; ".join(parts)

    @property
    def row(self) -> OperatorRow | None:
        return self.note.row

    @property
    def model_format(self) -> Precision | None:
        """The model's format of the result; None in an autocast region that a plan overrides."""
        if isinstance(self.note.autocast, Precision) and not self.graph.context.automatic:
            return None
        return format_of(self.graph.value(self.node))

    @property
    def refused(self) -> str | None:
        """Why the operator cannot be lowered; None if it can, and for rows without lowering."""
        row = self.row
        if row is None or not row.scaled:
            return None
        inputs = tuple(arguments(self.node).values())
        if not all(isinstance(argument_at(inputs, index), fx.Node) for index in row.scaled):
            return "an operand is no tensor"
        lowering = self.graph.context.lowerings.get(row.name)
        refused: str | None = f"{row.name} has no lowering"
        if lowering is not None:
            refused = lowering.refuses(self.node)
        return refused

    def supported(self, planned: Precision) -> tuple[Precision, str]:
        """Return the format that runs for a planned one, and why; see `resolve`."""
        assert self.row is not None, "adjustable operators have rows"
        context = self.graph.context
        exact = context.options.emulate_unsupported
        return resolve(self.row, planned, context.device, exact, self.model_format, self.refused)

    @property
    def source(self) -> Source | None:
        return source_of(self.node)

    @property
    def line(self) -> str:
        """Its position in the user's model, such as "model.py:42"; "" if unknown."""
        return f"{Path(self.source.file).name}:{self.source.line}" if self.source else ""

    @property
    def where(self) -> str:
        """The operator's id and its line in the user's model, for error messages."""
        if self.source is None:
            return f"operator {self.id}"
        return f"operator {self.id}, {self.source}: {self.source.code}"

    def update(self, **changes: Any) -> None:
        note = self.note
        if any(getattr(note, name) != value for name, value in changes.items()):
            node_metadata.NOTE[self.node] = dataclasses.replace(note, **changes)

    def assign(self, name: str | Precision, reason: str) -> None:
        """Give an adjustable operator a precision against the plan, with a reason for reports."""
        wanted = precision(name)
        if self.kind is not Kind.ADJUSTABLE:
            message = f"{self.id} is {self.kind}: no pass can assign {wanted} to it"
            do = 'use graph.operators("adjustable"); dependent operators follow their inputs'
            raise PrecisionError(message, where=self.where, do=do)
        self.decide(wanted, reason, pinned=True)

    def slower(self, fmt: Precision) -> str | None:
        """Return why a wider format is as fast on the device, or None if it is not or unknown."""
        context = self.graph.context
        offered = support(context.device, fmt)
        if offered.kind == "simulated":
            return offered.reason
        if fmt.bits >= 32 or self.row is None or not self.row.scaled:
            return None  # a product without a weight has no lowering that knows its shape
        lowering = context.lowerings.get(self.row.name)
        result: str | None = lowering and lowering.slower(self.node, fmt, context)
        return result

    def decide(
        self, planned: Precision, reason: str, pinned: bool = False, skip_unprofitable: bool = False
    ) -> None:
        """Record the planned precision, the precision that operator and device support, and why.

        With `skip_unprofitable`, a wider format that is as fast is used.
        """
        runs, but = self.supported(planned)
        while skip_unprofitable and (slower := self.slower(runs)) is not None:
            wider = self._wider(runs)
            if wider is runs:
                break
            but = "; ".join(filter(None, (but, f"{slower}, so it runs in {wider}")))
            runs = wider
        reason = "; ".join(filter(None, (reason, but)))
        self.update(planned=planned, precision=runs, reason=reason, instead=but, pinned=pinned)

    def _wider(self, fmt: Precision) -> Precision:
        """Return the format to try instead of an unprofitable one: the model's if it is narrow."""
        if self.model_format is not None and self.model_format.bits < 32:
            return self.model_format
        if fmt.plain:
            return FP32
        return row_on(self.graph.context.device, fmt).elsewhere

    def __repr__(self) -> str:
        return f"<Operator {self.id} {self.kind} {self.precision or 'unassigned'}>"


@dataclass(frozen=True)
class Context:
    """Context of a compilation.

    Attributes:
        plan: the active plan: the user's, or the uniform one of the options.
        fake_mode: the mode of every fake tensor in the graph; None for a graph without tensors.
        ambient: (enabled, dtype) of an autocast region around the entire graph.
        complete: whether the graph is the entire model (no graph break, no split by DDP).
        earlier_operators: operators of earlier graphs of the model, which the plan may name.
        lowerings: lowerings of adjustable operators to `qsync::` operators, by row name.
    """

    device: torch.device
    options: Options
    plan: Plan
    fake_mode: FakeTensorMode | None
    ambient: tuple[bool, torch.dtype] | None = None
    training: bool = True
    complete: bool = True
    earlier_operators: frozenset[OpId] = frozenset()
    modules: frozenset[str] | None = None
    lowerings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def automatic(self) -> bool:
        """Whether the user requested neither a plan nor a precision: autocast regions decide."""
        return self.options.is_default

    @property
    def skips_unprofitable(self) -> bool:
        """Whether formats that are not faster are replaced: the option, or its default on GPUs.

        A plan is an explicit choice, which the default does not change.
        """
        options = self.options
        if options.skip_unprofitable is not None:
            return options.skip_unprofitable
        on_gpu = options.target is not None or is_gpu(self.device)
        return on_gpu and options.precision is not None and not options.emulate_unsupported

    def on_target(self) -> AbstractContextManager[None]:
        """Activate the target device of the options, if any, for queries about the device."""
        return targeted(self.options.target, self.device)


class PrecisionGraph:
    """One graph on its way through the passes.

    Attributes:
        module: the graph and the tensors it refers to. A pass may change or replace it.
        outputs: the dtype of each output that Dynamo expects; None for other values than tensors,
            or if Dynamo does not say.
        parent: the graph that calls this body of a higher-order operator; None at the top.
        written: a copy from before casts are inserted: the graph of the model and the user's
            passes. None before classification, and for bodies.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: list[Any],
        context: Context,
        parent: PrecisionGraph | None = None,
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
    def top_level(self) -> PrecisionGraph:
        """The top-level graph that contains this body; itself if it is not a body."""
        return self if self.parent is None else self.parent.top_level

    @property
    def where(self) -> str:
        """The position of the graph in the user's model, for error messages."""
        for operator in self.operators():
            return f"the graph that starts with {operator.where}"
        return "a graph without operators"

    def own_operators(self) -> list[Operator]:
        """Return the operators of this graph, without operators in bodies."""
        return [Operator(self, node) for node in self.nodes if node in node_metadata.NOTE]

    def operators(
        self, kind: Kind | str | None = None, pattern: str | None = None
    ) -> list[Operator]:
        """Return the operators, in bodies too, by kind and by pattern of their id."""
        return [
            operator
            for graph in self.walk()
            for operator in graph.own_operators()
            if kind is None or operator.kind is Kind(kind)
            if pattern is None or operator.id.matches(pattern)
        ]

    def walk(self) -> Iterator[PrecisionGraph]:
        """Yield this graph and, depth first, the bodies that the passes rewrite."""
        yield self
        for node in self.nodes:
            for body in node_metadata.bodies(node):
                yield from body.walk()

    def output_types(self) -> list[torch.dtype | None]:
        """Return the current dtype of each output; None for other values than tensors."""
        (output,) = (node for node in self.nodes if node.op == "output")
        values = (self.value(used) for used in tree_leaves(output.args))
        return [getattr(value, "dtype", None) for value in values]

    @functools.cached_property
    def costing(self) -> Costing:
        """Costs of operators in each of their states."""
        from qsync_fx.graph.operator_costs import Costing
        from qsync_fx.graph.saved_tensors import Flow

        if self.written is None:
            raise PassError("the graph has no operators yet", do='ask after the pass "classify"')
        return Costing(Flow(self.written))

    def value(self, node: Any) -> Any:
        """Return the fake value of a node; another object is its own value."""
        if not isinstance(node, fx.Node):
            return node
        return node.meta.get("val", node.meta.get("example_value"))

    def propagate(self, node: fx.Node) -> None:
        """Recompute a node's fake value; raise `PassError` if it rejects its arguments."""
        value = self.computed(node)
        if node.meta.get("unbacked_bindings"):
            # Data-dependent sizes got their symbols in tracing; new symbols would be unbound.
            value = _sized_as(self.value(node), value)
        node.meta["val"] = value

    def computed(self, node: fx.Node) -> Any:
        """Return the result for the fake values of a node's arguments; raise like `propagate`."""
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self.value)
        try:
            enabled, dtype = node_metadata.REGION.get(node) or (False, None)
            region = torch.autocast(self.context.device.type, dtype, enabled)
            with fake_run(self.context.fake_mode, torch.no_grad(), region):
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            noted = node in node_metadata.NOTE
            where = Operator(self, node).where if noted else f"node %{node.name}"
            operands = ", ".join(describe(self.value(a)) for a in node.args)
            message = f"{target_name(node)} does not take ({operands}): {error}"
            do = "give it operands of matching formats"
            raise PassError(message, where=where, do=do) from error


def _sized_as(before: Any, now: Any) -> Any:
    """Return values with the dtypes of `now` and the sizes of `before`."""
    if isinstance(now, (list, tuple)):
        return type(now)(_sized_as(b, n) for b, n in zip(before, now, strict=True))
    return before.to(now.dtype) if isinstance(now, torch.Tensor) else before


def copied(graph: PrecisionGraph, parent: PrecisionGraph | None = None) -> PrecisionGraph:
    """Return a copy of the graph and of the bodies of its higher-order operators.

    The copy shares tensors and frozen notes with the original. `parent` contains a copied body.
    """
    nodes: dict[fx.Node, fx.Node] = {}
    new = fx.Graph()
    output = new.graph_copy(graph.graph, nodes, return_output_node=True)
    if isinstance(output, tuple):
        new.output(output[0]).meta = dict(output[1].meta)
    module = _LazyGraphModule(graph.module, new)  # its code is generated only if it runs
    copy = PrecisionGraph(module, list(graph.inputs), graph.context, parent)
    copy.module.meta.update(graph.module.meta)
    copy.numbers, copy.outputs = graph.numbers.copy(), list(graph.outputs)
    copy.unknown, copy.rewritten = dict(graph.unknown), dict(graph.rewritten)
    for old, node in nodes.items():
        before: tuple[PrecisionGraph, ...] = node_metadata.bodies(old)
        bodies = tuple(copied(body, copy) for body in before)
        if bodies:
            node_metadata.BODIES[node] = bodies
        for body in bodies:
            node_metadata.CALLER[body.nodes[-1]] = node
        modules = {id(a.module): b.module for a, b in zip(before, bodies, strict=True)}
        for used in node.all_input_nodes:
            live = used.op == "get_attr" and getattr(graph.module, str(used.target), None)
            if id(live) in modules:
                setattr(copy.module, str(used.target), modules[id(live)])
    return copy


def adopt_attributes(new: fx.GraphModule, old: fx.GraphModule) -> None:
    """Copy the metadata, and Dynamo's attributes that Inductor and AOTAutograd read."""
    new.meta.update(old.meta)
    names = ("compile_subgraph_reason", "_param_name_to_source", "_backend_id")
    for name in (*names, "torchdynamo_force_dynamic"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of Dynamo's module that shares its tensors and its bodies' graphs."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copy = nodes[node] = graph.node_copy(node, nodes.__getitem__)
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
    new = fx.GraphModule(module, graph)
    adopt_attributes(new, module)
    return new


aten = torch.ops.aten

VECTORS: Final = "vectors"
"""Value of `computed` for dropout with vectorized random numbers (option "fast_dropout")."""


def drops(node: fx.Node) -> bool:
    """Return whether a node may be or contain a dropout."""
    dropouts = aten.dropout.default, aten.native_dropout.default
    return node.target in (*dropouts, aten.scaled_dot_product_attention.default)


def may_be_drawn(graph: PrecisionGraph) -> bool:
    """Return whether a CPU graph has a dropout and the options allow vectorized random numbers."""
    options, device = graph.context.options, graph.context.device
    if options.fast_dropout is False or options.inner_backend != "inductor":
        return False
    if device.type != "cpu" or capability(device) != ANY:
        return False
    return any(drops(node) for part in graph.walk() for node in part.nodes)


def drawn(graph: PrecisionGraph) -> bool:
    """Return whether dropout uses vectorized random numbers.

    It does not in bodies, which may be recomputed from another seed, nor for torch.native_dropout
    in the model.
    """
    if not may_be_drawn(graph) or len(list(graph.walk())) > 1:
        return False
    return not any(node.target is aten.native_dropout.default for node in graph.nodes)
