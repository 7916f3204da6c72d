"""One graph of an explanation as operators and values that refer to one another by their place.

Invariant: what is read here is what the passes decide by: the rules of `graph/cascading.py`, `resolve`, and the places of casts. Nothing is
decided anew, and the graph stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from qsync_fx.devices import row_on
from qsync_fx.graph import Operator as Handle, PrecisionGraph, meta
from qsync_fx.graph.algebra import Size
from qsync_fx.graph.cascading import handed_on, rule_of, wide_readers
from qsync_fx.graph.costs.flow import Site
from qsync_fx.graph.costs.places import Place
from qsync_fx.graph.costs.total import Costing
from qsync_fx.graph.dropout import VECTORS, drawn, drops
from qsync_fx.graph.effects.bodies import operands as handed_in
from qsync_fx.graph.nodes import source_of
from qsync_fx.graph.notes import Note
from qsync_fx.graph.reads import Operand
from qsync_fx.graph.values import describe, expression, format_of, is_float, tensors
from qsync_fx.ops import Kind
from qsync_fx.precision import FORMATS, FP32, Precision
from qsync_fx.predictor.model.names import name_of
from qsync_fx.predictor.model.sizes import canonical
from qsync_fx.predictor.model.value import Choices, Follows, Name, Operator, Read, Value
from qsync_fx.resolve import resolve, stays


class Reading:
    """
    Args:
        graph: its place among those of the model.
        values: those of the graphs before it, which its own are added to.
        first: the place of its first operator.
        points: the number of places of casts in graphs before it.
        pinned: the formats of operators that a pass of the user's has assigned, by id.

    Attributes:
        operators: without their costs.
        outputs: what the graph returns, if that is a tensor.
        parameters: its parameters by path, each with the places of the operators that read it.
        points: the places at which casts may stand, those before it included.
    """

    def __init__(
        self, costing: Costing, graph: int, values: list[Value], first: int, points: int, pinned: dict[str, str]
    ) -> None:
        self.costing, self.flow = costing, costing.flow
        self.number, self.values, self.pinned = graph, values, pinned
        self.index = {site.node: first + at for at, site in enumerate(self.flow.sites)}
        self._numbers: dict[fx.Node, int] = {}
        self._given: dict[fx.Node, fx.Node] = {}
        self._points: dict[Hashable, int] = {}
        self._first_point = points
        self._tables: dict[Hashable, Mapping[str, Name]] = {}
        self._in_vectors = drawn(self.flow.graph)
        found = [place for place in costing.places if isinstance(place, Place)]
        self._places = {(p.reader.node, p.operand): p for p in found if p.reader is not None}
        self._returned = {place.used: place for place in found if place.reader is None}
        self._enter(self.flow.graph)
        self.operators = [self._operator(site) for site in self.flow.sites]
        self.outputs = [self._output(node) for node in self.flow.outputs if self._tensors(node)]
        self.parameters = self._parameters()

    @property
    def points(self) -> int:
        return self._first_point + len(self._points)

    def name(self, node_name: str) -> str:
        """Returns how a node is called in the whole model."""
        return f"{self.number}:{node_name}" if self.number else node_name

    def _enter(self, graph: PrecisionGraph) -> None:
        for node in graph.nodes:
            for body in meta.bodies(node):
                self._given |= {p: given for p, given in handed_in(node, body) if isinstance(given, fx.Node)}
                self._enter(body)

    # Values.

    def _tensors(self, node: fx.Node) -> list[torch.Tensor]:
        return tensors(self.flow.graph.value(node))

    def _value(self, node: fx.Node) -> int:
        if node not in self._numbers:
            root = self.flow.tensor(node)
            at = self._value(root) if root is not node else None
            self._numbers[node] = len(self.values)
            self.values.append(self._described(node, len(self.values) if at is None else at))
        return self._numbers[node]

    def _described(self, node: fx.Node, tensor: int) -> Value:
        found = self._tensors(node)
        fmt = format_of(self.flow.graph.value(node))
        return Value(
            name=self.name(node.name),
            tensor=tensor,
            operator=self.index.get(self.flow.source(node)),
            source=self._source(node),
            own=name_of(fmt),
            numel=self._size(sum((expression(t.numel()) for t in found if is_float(t)), start=0)),
            fixed=self._size(
                sum((expression(t.numel()) * t.element_size() for t in found if not is_float(t)), start=0)
            ),
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
        held = meta.PATH.get(source) or source.op == "get_attr"
        return "buffer" if held else "input" if source.op == "placeholder" else "constant"

    # Operators.

    def _operator(self, site: Site) -> Operator:
        note = meta.NOTE[site.node]
        source = source_of(site.node)
        row = note.row
        return Operator(
            id=str(note.id),
            kind=str(note.kind),
            row=row.name if row is not None else note.id.operator,
            shape=self._shape(site),
            line=f"{Path(source.file).name}:{source.line}" if source is not None else "",
            graph=self.number,
            repeated=site.repeated,
            result=self._value(site.node),
            reads=tuple(self._read(site, o, need) for o, need in zip(site.operands, site.needs, strict=True)),
            decided=self._choices(site, note) if note.kind is Kind.ADJUSTABLE else self._follows(site),
            converts=row is not None and row.converts,
            converted=row is not None and row.output_only and note.kind is Kind.ADJUSTABLE,
            costs={},
            method=VECTORS if self._in_vectors and drops(site.node) else _method(site.node),
        )

    def _shape(self, site: Site) -> str:
        text = describe(site.graph.value(site.node))
        for symbol, name in self.flow.sizes.items():
            text = re.sub(rf"\b{re.escape(str(symbol))}\b", str(name), text)
        return text

    def _read(self, site: Site, operand: Operand, gradient: bool) -> Read:
        place = self._places.get((site.node, operand))
        value = self._value(operand.node)
        if place is None:
            return Read(value, operand.role, {}, None, value, gradient)
        return Read(value, operand.role, self._wanted(place), self._point(place), self._value(place.origin), gradient)

    def _output(self, node: fx.Node) -> Read:
        place, value = self._returned.get(node), self._value(node)
        if place is None:
            return Read(value, "output", {}, None, value, False)
        return Read(value, "output", self._wanted(place), self._point(place), self._value(place.origin), False)

    def _wanted(self, place: Place) -> Mapping[str, Name]:
        """What a place wants, by what its reader computes in; places that want alike share the answer."""
        found = {name_of(fmt) or "": name_of(place.wanted(fmt)) for fmt in (None, *FORMATS.values())}
        return self._tables.setdefault(tuple(found.items()), found)

    def _point(self, place: Place) -> int:
        return self._first_point + self._points.setdefault(place.shared, len(self._points))

    def _choices(self, site: Site, note: Note) -> Choices:
        context, handle, row = site.graph.context, Handle(site.graph, site.node), note.row
        assert row is not None, "adjustable operators have rows"
        own = format_of(site.graph.value(site.node))
        held, region = own or FP32, isinstance(note.autocast, Precision)
        here = {fmt: row_on(context.device, fmt) for fmt in FORMATS.values()}
        kept = [fmt for fmt in here if note.autocast == "off" or (not region and stays(held, here[fmt], False))]
        refused, given = handle.refused, None if region else own
        runs = {fmt: resolve(row, fmt, context.device, context.options.exact, given, refused)[0] for fmt in here}
        scaled = own is not None and own.bits < 32
        readers = wide_readers(site.node) if own is not None and not scaled else None
        gradients = {fmt: here[fmt].gradient for fmt in runs.values() if fmt.scaled}
        return Choices(
            runs={fmt.name: found.name for fmt, found in runs.items()},
            held=held.name,
            keeps=tuple(fmt.name for fmt in kept),
            outputs={}
            if own is None
            else {fmt.name: (own if fmt.scaled and scaled else here[fmt].output).name for fmt in runs.values()},
            wide=own.name if own is not None and readers is not None else None,
            readers=tuple(self.index[user] for user in readers or ()),
            pinned=self.pinned.get(str(note.id)),
            unpacked={fmt.name: gradient.name for fmt, gradient in gradients.items() if gradient.plain},
        )

    def _follows(self, site: Site) -> Follows:
        rule = rule_of(site.graph, site.node, automatic=False)
        sources = [self._decider(site.graph, used) for used in rule.inputs]
        given = [found for found in sources if isinstance(found, Precision)]
        widest = rule.promotion(given)
        return Follows(
            operators=tuple(dict.fromkeys(found for found in sources if isinstance(found, int))),
            given=name_of(widest),
            own=name_of(rule.own),
            promotes=rule.promotes,
            scalar=max(map(abs, rule.scalars), default=0.0),
            named=name_of(rule.named),
        )

    def _decider(self, graph: PrecisionGraph, node: fx.Node) -> int | Precision | None:
        """The operator whose output a node's format is, or the format that it has whatever the plan."""
        while node not in self.index:
            source = self._given.get(node) or handed_on(graph, node, automatic=False)
            if source is None:
                return format_of(graph.value(node))
            node = source
        return self.index[node]

    def _parameters(self) -> dict[str, tuple[torch.nn.Parameter, list[int]]]:
        readers: dict[fx.Node, list[int]] = {}
        for site in self.flow.sites:
            for source in {self.flow.source(operand.node) for operand in site.operands}:
                readers.setdefault(source, []).append(self.index[site.node])
        found: dict[str, tuple[torch.nn.Parameter, list[int]]] = {}
        for node in self.flow.graph.nodes:
            value = self.flow.graph.value(node)
            if node.op == "placeholder" and isinstance(value, torch.nn.Parameter):
                found[meta.PATH.get(node) or node.name] = (value, readers.get(node, []))
        return found


def _method(node: fx.Node) -> str:
    """How an operator computes, of several ways: what a gelu approximates by."""
    found = node.kwargs.get("approximate", "none")
    return "" if found == "none" else str(found)
