"""What flows through a graph as the model wrote it: where each tensor comes from, which need gradients, what is kept for them.

Read from a graph before casts are inserted. Whatever lies between an operator and its reader is looked through: unpacking, borders of
checkpointed bodies, casts of an autocast region.

Invariant: a tensor that several nodes show, each as a view, is one tensor, named after the node that made it.
"""

from __future__ import annotations

import operator as py_operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.costs.kept import Autograd, Kept, Read
from qsync_fx.graph.effects.bodies import operands as body_operands, result_of
from qsync_fx.graph.effects.memory import Memory
from qsync_fx.graph.effects.modes import switches_grad
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.reads import Operand, Reader, State, operands
from qsync_fx.graph.values import expression, is_float, storage_of, tensors
from qsync_fx.plan.opid import OpId


@dataclass(frozen=True)
class Site:
    """An operator where it stands.

    Attributes:
        node: its node.
        graph: the graph, or body, that the node is in.
        reader: what it reads, and how.
        needs: for each operand, whether a gradient flows back to it.
        repeated: whether activation checkpointing computes it again.
        order: its place among the operators of the whole graph.
    """

    node: fx.Node
    graph: PrecisionGraph
    reader: Reader
    needs: tuple[bool, ...]
    repeated: bool
    order: int

    @property
    def id(self) -> OpId:
        note = meta.NOTE[self.node]
        return note.id

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.reader.operands


class Flow:
    """
    Attributes:
        sites: the operators in the order they run, those in bodies included.
        by_node: the same, by their nodes.
        outputs: nodes whose values the graph returns.
        sizes: readable names for symbolic sizes: "batch" for the first dimension of the first input that has a symbolic one, "sequence" for
            the second of token ids, else the input's name and the dimension.
    """

    def __init__(self, graph: PrecisionGraph) -> None:
        self.graph = graph
        self.sites: list[Site] = []
        self.outputs: list[fx.Node] = []
        self._autograd = Autograd(graph.context.fake_mode, graph.context.device, graph.context.options)
        self._needs: dict[fx.Node, bool] = {}
        self._same: dict[fx.Node, fx.Node] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._memory: dict[PrecisionGraph, Memory] = {graph: Memory(graph)}
        self._walk(graph, repeated=False)
        self.by_node = {site.node: site for site in self.sites}
        self.sizes = _named_sizes(graph)

    def source(self, node: fx.Node) -> fx.Node:
        """Returns the operator, parameter or input whose result a node hands on unchanged: the node itself for those."""
        while node in self._same:
            node = self._same[node]
        return node

    def tensor(self, node: fx.Node) -> fx.Node:
        """Returns the node that made the memory that a node's value lies in."""
        node = self.source(node)
        while node in self._roots:
            node = self.source(self._roots[node])
        return node

    def is_view(self, node: fx.Node) -> bool:
        """Whether a node's value lies in the memory of one of its operands."""
        return node in self._roots

    def needs(self, node: fx.Node) -> bool:
        """Whether a gradient flows back to a node's value."""
        return self._needs.get(node, False)

    def memory(self, graph: PrecisionGraph) -> Memory:
        """Returns which values of the graph, or of one of its bodies, share memory."""
        return self._memory[graph]

    def kept(self, site: Site, state: State) -> Kept:
        """Returns what an operator keeps for its backward pass in a state that torch computes itself."""
        graph = site.graph
        reads: dict[fx.Node, Read] = {}
        for operand, need in zip(site.operands, site.needs, strict=True):
            value = graph.value(operand.node)
            fmt = site.reader.read_as(state.precision, operand, value)
            before = reads.get(operand.node)
            dtype = fmt.dtype if fmt is not None else None
            reads[operand.node] = Read(value, dtype, need or (before is not None and before.need))
        ordered = {used: reads[used] for used in site.node.all_input_nodes}
        return self._autograd.kept(site.node, ordered)

    def _walk(self, graph: PrecisionGraph, repeated: bool) -> None:
        recording = graph.context.training
        before_inference: dict[Any, bool] = {}
        for node in graph.nodes:
            if switches_grad(node):
                first = node.args[0]
                name = getattr(node.target, "__name__", "")
                if name == "_enter_inference_mode":
                    before_inference[node] = recording
                    recording = not first and graph.context.training
                elif name == "_exit_inference_mode":
                    recording = before_inference[first]
                else:
                    recording = bool(first) and graph.context.training
            elif node.op in ("placeholder", "get_attr"):
                value = graph.value(node)
                self._needs.setdefault(node, isinstance(value, torch.Tensor) and value.requires_grad and recording)
            elif node.op == "output":
                if graph.parent is None:
                    fx.node.map_arg(node.args, self.outputs.append)
            elif node.op == "call_function":
                self._visit(graph, node, recording, repeated)

    def _visit(self, graph: PrecisionGraph, node: fx.Node, recording: bool, repeated: bool) -> None:
        for body in meta.bodies(node):
            for placeholder, given in body_operands(node, body):
                if isinstance(given, fx.Node):
                    self._same[placeholder] = given
                    self._needs[placeholder] = self._needs.get(given, False)
            around = self._memory[graph]
            given = {p: around.of(used) for p, used in body_operands(node, body) if isinstance(used, fx.Node)}
            self._memory[body] = Memory(body, given)
            self._walk(body, repeated=True)
        inner = result_of(node)
        if inner is not None:
            self._same[node] = inner
        elif node.target is py_operator.getitem or meta.has_purpose(node, meta.Purpose.AUTOCAST):
            fx.node.map_arg(node.args[0], lambda used: self._same.__setitem__(node, used))
        if node in self._same:
            self._needs[node] = self._needs.get(self._same[node], False) and recording
            return
        note = meta.NOTE.get(node)
        read = operands(node, note)
        needs = tuple(recording and self._needs.get(o.node, False) and is_float_all(graph.value(o.node)) for o in read)
        if note is None or meta.bodies(node):
            self._needs[node] = any(needs)
        else:
            site = Site(node, graph, Reader.of(node, note, graph.value(node)), needs, repeated, len(self.sites))
            self.sites.append(site)
            kept = self.kept(site, State(None, None))
            self._needs[node] = kept.differentiable
        self._alias(graph, node)

    def _alias(self, graph: PrecisionGraph, node: fx.Node) -> None:
        mine = {storage_of(t) for t in tensors(graph.value(node))}
        for used in node.all_input_nodes:
            if mine & {storage_of(t) for t in tensors(graph.value(used))}:
                self._roots[node] = used
                return


def _named_sizes(graph: PrecisionGraph) -> dict[sympy.Symbol, sympy.Symbol]:
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        value = graph.value(node)
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for at, size in enumerate(value.shape):
            symbol = expression(size)
            if not isinstance(symbol, sympy.Symbol) or symbol in found:
                continue
            usual = "batch" if at == 0 else "sequence" if at == 1 and not is_float(value) else ""
            name = usual if usual and usual not in taken else f"{node.name}_{at}"
            taken.add(name)
            found[symbol] = sympy.Symbol(name, **symbol.assumptions0)
    return found


def is_float_all(value: Any) -> bool:
    """Whether a gradient may flow back to a value: a floating-point tensor, or several."""
    return any(is_float(t) for t in tensors(value))
