"""The precision DAG with the costs of every operator state, and the attribution of kernels.

The DAG is read from a graph before casts are inserted, so it is valid for every plan. Its node
names outlive a graph: operator ids, parameter paths, input names. `charge` attributes each
computing node of a lowered graph to an operator, `charges` the nodes that torch creates later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import networkx as nx
import torch
from torch import fx

from qsync_fx.devices.format_support import row_on
from qsync_fx.formats import FORMATS
from qsync_fx.graph import node_metadata
from qsync_fx.graph.cost_algebra import Cost
from qsync_fx.graph.fx_utils import describe, expression, format_of, is_float, source_of, tensors
from qsync_fx.graph.graph import Operator, PrecisionGraph
from qsync_fx.graph.node_metadata import CostAttribution
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import operator_cost
from qsync_fx.graph.saved_tensors import Flow, OperandSite
from qsync_fx.ops.spec import Kind

OUTPUT = "output"


class Costs(Mapping[OperandState, Cost]):
    """Costs of one operator by state, computed on demand.

    Raise `KeyError` for a state that the operator cannot be in.
    """

    def __init__(self, flow: Flow, site: OperandSite, states: tuple[OperandState, ...]) -> None:
        self._flow, self._site, self._states = flow, site, states
        self._known: dict[OperandState, Cost] = {}

    def __getitem__(self, state: OperandState) -> Cost:
        if state not in self._states:
            raise KeyError(state)
        if state not in self._known:
            self._known[state] = operator_cost(self._flow, self._site, state)
        return self._known[state]

    def __iter__(self) -> Iterator[OperandState]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def precision_dag(graph: PrecisionGraph) -> nx.MultiDiGraph:
    """Return the operators of a graph, with the tensors between them as edges.

    Nodes have `type`: "operator", "parameter", "input" or "output". Operators have `kind`, `row`
    (name), `order`, `shape`, `numel`, `line` ("file:line" or ""), `repeated` (whether activation
    checkpointing recomputes them), `precisions` (names of their possible formats) and `costs` (a
    mapping from `OperandState` to `Cost`). Parameters and inputs have `shape` and `numel`.
    Edges have `role` (the argument's name), `tensor` (the tensor's name; its views share it),
    `numel`, `own` (the name of the model's format, None for integers) and `gradient` (whether a
    gradient flows back).

    Raises:
        PassError: the graph is not classified yet.
    """
    with graph.context.there():
        return _dag(graph.costing.flow)


def _dag(flow: Flow) -> nx.MultiDiGraph:
    result: nx.MultiDiGraph = nx.MultiDiGraph()
    for site in flow.sites:
        _add_operator(result, flow, site)
    for site in flow.sites:
        for operand, need in zip(site.operands, site.needs, strict=True):
            value = site.graph.value(operand.node)
            _connect(result, flow, value, operand.node, str(site.id), operand.role, need)
    for node in flow.outputs:
        _connect(result, flow, flow.graph.value(node), node, OUTPUT, role="output", gradient=False)
    return result


def states(site: OperandSite) -> tuple[OperandState, ...]:
    """Return the states that an operator can be in on its graph's device under any plan."""
    note = node_metadata.NOTE[site.node]
    owned = format_of(site.graph.value(site.node))
    if note.kind is Kind.ADJUSTABLE and note.row is not None:
        device, operator = site.graph.context.device, Operator(site.graph, site.node)
        result: dict[OperandState, None] = {}
        for fmt in dict.fromkeys(operator.supported(fmt)[0] for fmt in FORMATS.values()):
            result[OperandState(fmt, row_on(device, fmt).output)] = None
            if fmt.scaled and owned is not None and owned.bits >= 32:
                result[OperandState(fmt, owned)] = None
        return tuple(result)
    if note.kind is Kind.DEPENDENT and owned is not None:
        formats = [fmt for fmt in FORMATS.values() if fmt.plain and not fmt.scaled]
        return tuple(OperandState(fmt, fmt) for fmt in formats)
    return (OperandState(owned, owned),)


def _add_operator(result: nx.MultiDiGraph, flow: Flow, site: OperandSite) -> None:
    note = node_metadata.NOTE[site.node]
    value = site.graph.value(site.node)
    can = states(site)
    result.add_node(
        str(note.id),
        type="operator",
        kind=str(note.kind),
        row=note.row.name if note.row is not None else note.id.operator,
        order=site.order,
        shape=describe(value),
        numel=_numel(value),
        line=str(source_of(site.node) or ""),
        repeated=site.repeated,
        precisions=tuple(
            dict.fromkeys(str(state.precision) for state in can if state.precision is not None)
        ),
        costs=Costs(flow, site, can),
    )


def _connect(
    result: nx.MultiDiGraph,
    flow: Flow,
    value: Any,
    used: fx.Node,
    reader: str,
    role: str,
    gradient: bool,
) -> None:
    if not tensors(value):
        return
    source = flow.source(used)
    name = node_metadata.PATH.get(source) or source.name
    if (note := node_metadata.NOTE.get(source)) is not None:
        name = str(note.id)
    if name not in result:
        live = source.meta.get("val", value)
        kind = "parameter" if isinstance(live, torch.nn.Parameter) else "input"
        result.add_node(name, type=kind, shape=describe(live), numel=_numel(live))
    if reader not in result:
        result.add_node(reader, type="output")
    written = is_float(tensors(value)[0]) and format_of(value)
    result.add_edge(
        name,
        reader,
        role=role,
        tensor=flow.tensor(used).name,
        numel=_numel(value),
        own=str(written) if written else None,
        gradient=gradient,
    )


def _numel(value: Any) -> Any:
    return sum((expression(t.numel()) for t in tensors(value)), start=0)


def charges(graph: fx.Graph) -> dict[fx.Node, CostAttribution]:
    """Return the charge of each computing node of a graph at any stage after lowering.

    A node without a mark belongs to its reader: the sum of two gradients to the operator that
    produced the value, the middle of a fused attention to the product at its end. A node without
    readers belongs to an operand. Examples are sums of gradients, writes to buffers, constants of
    decompositions and Inductor's pattern replacements; `from_node` does not identify them. A node
    without a connection to an operator is missing.
    """
    result = {
        node: charge
        for node in graph.nodes
        if computes(node) and (charge := node_metadata.charged(node)) is not None
    }
    available = -1
    # Repeat to a fixed point: a node charged to an operand may read constants of its own.
    while available < len(result):
        available = len(result)
        for node in reversed(graph.nodes):
            _beside(result, node, node.users)
        for node in graph.nodes:
            _beside(result, node, node.all_input_nodes)
    return result


def charge(graph: PrecisionGraph) -> None:
    """Charge the nodes of a graph with casts: an operator to itself, a cast to its owner.

    Other nodes belong to their neighbors. A node without a connection to an operator, such as the
    counter of a batch norm, belongs to the operator that follows it.
    """
    operators = {
        node: note for node in graph.nodes if (note := node_metadata.NOTE.get(node)) is not None
    }
    for node in graph.nodes:
        cast = node_metadata.CAST.get(node)
        if node in operators:
            node_metadata.charge(node, operators[node].id)
        elif cast is not None and cast.owner is not None:
            node_metadata.charge(node, cast.owner, cast.part)
    result = charges(graph.graph)
    near = next((str(note.id) for note in reversed(operators.values())), None)
    for node in reversed(graph.nodes):
        if node in operators:
            near = str(operators[node].id)
        owner = getattr(result.get(node), "owner", near)
        if computes(node) and owner is not None:
            cast = node_metadata.CAST.get(node)
            node_metadata.charge(node, owner, cast.part if cast is not None else None)


def computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def _beside(
    result: dict[fx.Node, CostAttribution], node: fx.Node, others: Iterable[fx.Node]
) -> None:
    """Charge an uncharged node to a neighbor, preferably an operator rather than a cast."""
    available = sorted(
        (result[other] for other in others if other in result),
        key=lambda charge: charge.part is not None,
    )
    if available and node not in result and computes(node):
        result[node] = CostAttribution(available[0].owner)
