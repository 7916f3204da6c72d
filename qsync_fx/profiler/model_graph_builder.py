"""Builder of the predictor's `ModelGraph` from an explanation.

It contains all facts of a model that the passes know and that no plan changes, from the functions
that the passes use. If the model has graph breaks, its graphs are concatenated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from qsync_fx.devices.format_support import resolve, row_on, stays
from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS, FP32, Precision, precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import operands as handed_in
from qsync_fx.graph.cascade_rules import handed_on, rule_of, wide_readers
from qsync_fx.graph.cost_algebra import Cost, Size
from qsync_fx.graph.fx_utils import describe, expression, format_of, is_float, source_of, tensors
from qsync_fx.graph.graph import VECTORS, Operator as Handle, PrecisionGraph, drawn, drops
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.graph.operand_formats import Operand
from qsync_fx.graph.operator_costs import CastSite, Costing
from qsync_fx.graph.saved_tensors import OperandSite
from qsync_fx.ops.spec import Kind
from qsync_fx.predictor.model.model_graph import (
    Choices,
    Follows,
    ModelGraph,
    ModelOperator,
    ModelParameter,
    ModelRead,
    Name,
    StateNames,
    Value,
    name_of,
    reachable,
    state_named,
)
from qsync_fx.predictor.model.symbolic_sizes import canonical
from qsync_fx.serialization.strict_json import Malformed

if TYPE_CHECKING:
    from qsync_fx.diagnostics.explanation import Explanation


class GraphReading:
    """One graph of an explanation, with operators, values and cast points numbered across graphs.

    `first` and `points` count the operators and cast points in the preceding graphs. Values
    are appended to `values`. `pinned` has the formats that a user's pass assigned, by operator.
    """

    def __init__(
        self,
        costing: Costing,
        graph: int,
        values: list[Value],
        first: int,
        points: int,
        pinned: dict[str, str],
    ) -> None:
        self.costing, self.flow = costing, costing.flow
        self.number, self.values, self.pinned = graph, values, pinned
        self.index = {site.node: first + index for index, site in enumerate(self.flow.sites)}
        self._numbers: dict[fx.Node, int] = {}
        self._body_inputs: dict[fx.Node, fx.Node] = {}
        self._points: dict[Hashable, int] = {}
        self._first_point = points
        self._tables: dict[Hashable, Mapping[str, Name]] = {}
        self._in_vectors = drawn(self.flow.graph)
        result = [place for place in costing.places if isinstance(place, CastSite)]
        self._places = {(p.reader.node, p.operand): p for p in result if p.reader is not None}
        self._returned = {place.used: place for place in result if place.reader is None}
        self._enter(self.flow.graph)
        self.operators = [self._operator(site) for site in self.flow.sites]
        self.outputs = [
            self._read_at(self._returned.get(node), node, "output", False)
            for node in self.flow.outputs
            if self._tensors(node)
        ]
        self.parameters = self._parameters()

    @property
    def points(self) -> int:
        return self._first_point + len(self._points)

    def name(self, node_name: str) -> str:
        return f"{self.number}:{node_name}" if self.number else node_name

    def _enter(self, graph: PrecisionGraph) -> None:
        for node in graph.nodes:
            for body in node_metadata.bodies(node):
                self._body_inputs |= {
                    p: value for p, value in handed_in(node, body) if isinstance(value, fx.Node)
                }
                self._enter(body)

    def _tensors(self, node: fx.Node) -> list[torch.Tensor]:
        return tensors(self.flow.graph.value(node))

    def _value(self, node: fx.Node) -> int:
        if node not in self._numbers:
            root = self.flow.tensor(node)
            if root is not node:
                self._value(root)  # a tensor precedes its views
            self._numbers[node] = len(self.values)
            self.values.append(self._described(node, self._numbers[root]))
        return self._numbers[node]

    def _described(self, node: fx.Node, tensor: int) -> Value:
        result = self._tensors(node)
        fmt = format_of(self.flow.graph.value(node))
        sizes = [expression(t.numel()) for t in result if is_float(t)]
        fixed = [expression(t.numel()) * t.element_size() for t in result if not is_float(t)]
        return Value(
            name=self.name(node.name),
            tensor=tensor,
            operator=self.index.get(self.flow.source(node)),
            source=self._source(node),
            own=name_of(fmt),
            numel=self._size(sum(sizes, start=0)),
            fixed=self._size(sum(fixed, start=0)),
            differentiated=self.flow.needs(node),
        )

    def _size(self, size: Any) -> Size:
        return canonical(size.xreplace(self.flow.sizes) if isinstance(size, sympy.Basic) else size)

    def _source(self, node: fx.Node) -> str:
        source = self.flow.source(node)
        if source in self.index:
            return "operator"
        if isinstance(source.meta.get("val"), torch.nn.Parameter):
            return "parameter"
        if node_metadata.PATH.get(source) or source.op == "get_attr":
            return "buffer"
        return "input" if source.op == "placeholder" else "constant"

    def _operator(self, site: OperandSite) -> ModelOperator:
        note = node_metadata.NOTE[site.node]
        source, row, adjustable = source_of(site.node), note.row, note.kind is Kind.ADJUSTABLE
        operands = zip(site.operands, site.needs, strict=True)
        # The variant, such as the approximation of a GELU.
        method = str(site.node.kwargs.get("approximate", "none")).replace("none", "")
        if self._in_vectors and drops(site.node):
            method = VECTORS
        return ModelOperator(
            id=str(note.id),
            kind=str(note.kind),
            row=note.id.operator if row is None else row.name,
            shape=self._shape(site),
            line="" if source is None else f"{Path(source.file).name}:{source.line}",
            graph=self.number,
            repeated=site.repeated,
            result=self._value(site.node),
            reads=tuple(self._read(site, operand, need) for operand, need in operands),
            decided=self._choices(site, note) if adjustable else self._follows(site),
            converts=row is not None and row.converts,
            converted=row is not None and row.output_only and adjustable,
            costs={},
            method=method,
        )

    def _shape(self, site: OperandSite) -> str:
        text = describe(site.graph.value(site.node))
        for symbol, name in self.flow.sizes.items():
            text = re.sub(rf"\b{re.escape(str(symbol))}\b", str(name), text)
        return text

    def _read(self, site: OperandSite, operand: Operand, gradient: bool) -> ModelRead:
        place = self._places.get((site.node, operand))
        return self._read_at(place, operand.node, operand.role, gradient)

    def _read_at(
        self, place: CastSite | None, node: fx.Node, role: str, gradient: bool
    ) -> ModelRead:
        value = self._value(node)
        if place is None:
            return ModelRead(value, role, {}, None, value, gradient)
        wanted, point = self._wanted(place), self._point(place)
        return ModelRead(value, role, wanted, point, self._value(place.origin), gradient)

    def _wanted(self, place: CastSite) -> Mapping[str, Name]:
        """Return a cast site's required format by its reader's format; equal maps are shared."""
        formats = (None, *FORMATS.values())
        result = {name_of(fmt) or "": name_of(place.wanted(fmt)) for fmt in formats}
        return self._tables.setdefault(tuple(result.items()), result)

    def _point(self, place: CastSite) -> int:
        return self._first_point + self._points.setdefault(place.shared, len(self._points))

    def _choices(self, site: OperandSite, note: OperatorInfo) -> Choices:
        context, handle, row = site.graph.context, Handle(site.graph, site.node), note.row
        assert row is not None, "adjustable operators have rows"
        owned = format_of(site.graph.value(site.node))
        live, region = owned or FP32, isinstance(note.autocast, Precision)
        current = {fmt: row_on(context.device, fmt) for fmt in FORMATS.values()}
        saved = [
            fmt
            for fmt in current
            if note.autocast == "off" or (not region and stays(live, current[fmt], False))
        ]
        device, emulate = context.device, context.options.emulate_unsupported
        inputs, refused = None if region else owned, handle.refused
        runs = {fmt: resolve(row, fmt, device, emulate, inputs, refused)[0] for fmt in current}
        outputs: dict[str, str] = {}
        readers = None
        if owned is not None:
            outputs = {fmt.name: current[fmt].output.name for fmt in runs.values()}
            if owned.bits < 32:
                # Scaled formats output the format of a model that is written in a narrow one.
                outputs |= {fmt.name: owned.name for fmt in runs.values() if fmt.scaled}
            else:
                readers = wide_readers(site.node)
        gradients = {fmt: current[fmt].gradient for fmt in runs.values() if fmt.scaled}
        return Choices(
            runs={fmt.name: item.name for fmt, item in runs.items()},
            held=live.name,
            keeps=tuple(fmt.name for fmt in saved),
            outputs=outputs,
            wide=name_of(owned) if readers is not None else None,
            readers=tuple(self.index[user] for user in readers or ()),
            pinned=self.pinned.get(str(note.id)),
            unpacked={
                fmt.name: gradient.name for fmt, gradient in gradients.items() if gradient.plain
            },
        )

    def _follows(self, site: OperandSite) -> Follows:
        rule = rule_of(site.graph, site.node, automatic=False)
        sources = [self._decider(site.graph, used) for used in rule.inputs]
        inputs = [item for item in sources if isinstance(item, Precision)]
        widest = rule.promotion(inputs)
        return Follows(
            operators=tuple(dict.fromkeys(item for item in sources if isinstance(item, int))),
            given=name_of(widest),
            own=name_of(rule.default),
            promotes=rule.promotes,
            scalar=max(map(abs, rule.scalars), default=0.0),
            named=name_of(rule.named),
        )

    def _decider(self, graph: PrecisionGraph, node: fx.Node) -> int | Precision | None:
        while node not in self.index:
            source = self._body_inputs.get(node) or handed_on(graph, node, automatic=False)
            if source is None:
                return format_of(graph.value(node))
            node = source
        return self.index[node]

    def _parameters(self) -> dict[str, tuple[torch.nn.Parameter, list[int]]]:
        readers: dict[fx.Node, list[int]] = {}
        for site in self.flow.sites:
            for source in {self.flow.source(operand.node) for operand in site.operands}:
                readers.setdefault(source, []).append(self.index[site.node])
        result: dict[str, tuple[torch.nn.Parameter, list[int]]] = {}
        for node in self.flow.graph.nodes:
            value = self.flow.graph.value(node)
            if node.op == "placeholder" and isinstance(value, torch.nn.Parameter):
                result[node_metadata.PATH.get(node) or node.name] = (value, readers.get(node, []))
        return result


def build_model_graph(explanation: Explanation, formats: Iterable[str] | None = None) -> ModelGraph:
    """Return the model graph of an explained model, for plans with the given or all formats.

    Raises:
        ProfileError: the model has no graph, or a size that cannot be serialized.
        PrecisionError: a format is unknown.
    """
    if not explanation.graphs:
        why = "; ".join(text.partition("\n")[0] for text in explanation.breaks)
        raise ProfileError(
            "Dynamo compiled no part of the model, so there is nothing to predict",
            where=why or None,
        )
    wanted = tuple(FORMATS)
    if formats is not None:
        wanted = tuple(precision(fmt).name for fmt in dict.fromkeys(formats))
    pinned = {str(op.id): str(op.precision) for op in explanation.operators if op.note.pinned}
    values: list[Value] = []
    graphs: list[GraphReading] = []
    try:
        with explanation.on_target():
            first = points = 0
            for number, part in enumerate(explanation.graphs):
                graphs.append(GraphReading(part.costing, number, values, first, points, pinned))
                first, points = first + len(graphs[-1].operators), graphs[-1].points
            operators = _costed(graphs, wanted)
    except Malformed as wrong:
        do = "explain it with sizes that are numbers: torch._dynamo.mark_static, or one input size"
        raise ProfileError(f"the model{wrong.what}", do=do) from None
    context = explanation.graphs[0].context
    return ModelGraph(
        device=context.options.target or context.device.type,
        operators=tuple(operators),
        values=tuple(values),
        outputs=tuple(read for graph in graphs for read in graph.outputs),
        parameters=tuple(_parameters(graphs, explanation)),
        points=points,
        formats=wanted,
    )


def _costed(graphs: Sequence[GraphReading], formats: Sequence[str]) -> list[ModelOperator]:
    operators = [operator for graph in graphs for operator in graph.operators]
    result = [(graph, site) for graph in graphs for site in graph.flow.sites]
    states = reachable(operators, formats)
    available: dict[Size, Size] = {}

    def size(value: Size) -> Size:
        if value not in available:
            available[value] = canonical(value)
        return available[value]

    def cost(graph: GraphReading, node: fx.Node, state: StateNames) -> Cost:
        owned = graph.costing.cost_without_casts(node, state_named(state)).each(size)
        saved = {(graph.name(tensor), fmt): n for (tensor, fmt), n in owned.saved.items()}
        return dataclasses.replace(owned, saved=saved)

    return [
        dataclasses.replace(operator, costs={state: cost(graph, site.node, state) for state in can})
        for operator, (graph, site), can in zip(operators, result, states, strict=True)
    ]


def _parameters(graphs: Sequence[GraphReading], explanation: Explanation) -> list[ModelParameter]:
    readers: dict[str, list[int]] = {}
    visited: dict[str, torch.nn.Parameter] = {}
    for graph in graphs:
        for path, (parameter, read) in graph.parameters.items():
            visited.setdefault(path, parameter)
            readers.setdefault(path, []).extend(read)
    entries = [(e.path, e.numel, e.dtype_bytes, e.trained) for e in explanation.parameters]
    registered = {entry[0] for entry in entries}
    for path, live in visited.items():
        if path not in registered:
            entries.append((path, int(live.numel()), live.element_size(), live.requires_grad))
    return [ModelParameter(*entry, tuple(readers.get(entry[0], ()))) for entry in entries]
