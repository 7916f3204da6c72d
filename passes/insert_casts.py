"""Insertion of casts: operands and outputs get the formats that their notes require.

Invariant: afterwards every operator reads operands of the required format, every graph output has
the dtype that Dynamo expects, and each value in `meta["val"]` equals the value that torch computes
for the rewritten graph. In-place operators write to the original tensor, never to a cast of it. If
a conversion that the model uses as a copy becomes a no-op, a copy replaces it.
"""

from __future__ import annotations

import dataclasses
import operator as py_operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from qsync_fx.graph import PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import in_place, operands, results, writes
from qsync_fx.graph.fx_utils import is_float, is_switch, memory_order, same_strides
from qsync_fx.graph.node_metadata import CastInfo, OperatorInfo, Part, Purpose
from qsync_fx.graph.operand_formats import Operand, OperandReader, map_operands
from qsync_fx.ops import Kind
from qsync_fx.passes.casting import Casts, cast_outputs, drop_unread_casts, owner_of, plain_type
from qsync_fx.passes.lowering_registry import Lowering, Role
from qsync_fx.passes.pass_base import Scope
from qsync_fx.rounding import Rounding


@dataclass(frozen=True)
class InsertCasts:
    """Pass that inserts casts, shared between readers.

    Attributes:
        rounding: "stochastic", "nearest" or "floor", for formats rounded by `qsync::` operators.
        scaling: "tensor" or "channel".
        lowerings: lowerings by row name; they define the dimensions of per-channel scales.
    """

    name: ClassVar[str] = "insert_casts"
    scope: ClassVar[Scope] = Scope.MODEL

    rounding: Rounding = "stochastic"
    scaling: str = "tensor"
    lowerings: Mapping[str, Lowering] = field(default_factory=dict)

    def __call__(self, graph: PrecisionGraph) -> None:
        _Inserter(graph, self).run()


class _Inserter:
    def __init__(
        self,
        graph: PrecisionGraph,
        options: InsertCasts,
        outer: tuple[_Inserter, fx.Node] | None = None,
    ) -> None:
        self.graph, self.options, self.inside = graph, options, outer is not None
        around = outer and (outer[0].casts, outer[1])
        self.casts: Casts = Casts(graph, options.rounding, around)
        self.copies: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in self.graph.nodes:
            self.visit(node)
            self.casts.passed(node)
        drop_unread_casts(self.graph)
        self.graph.module.recompile()

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            if not self.inside:  # the readers of a body's results convert them
                cast_outputs(self.casts, node)
            return
        note = node_metadata.NOTE.get(node)
        if note is None:
            self._refresh(node)
            return
        if bodies := node_metadata.bodies(node):
            for body in bodies:
                self._enter(node, body)
            return
        before = (node.args, node.kwargs)
        self._operands(node, note)
        self._refresh(node, force=(node.args, node.kwargs) != before)
        self._write_back(node)
        self._keep_apart(node)
        self._output(node, note)

    def _operands(self, node: fx.Node, note: OperatorInfo) -> None:
        reader, fmt = OperandReader.of(node, note, self.casts.values[node]), note.precision
        rounds = note.kind is Kind.ADJUSTABLE and fmt is not None and not fmt.plain
        # Until `lower` runs, torch computes a scaled operator in its output format, so its other
        # operands have that format. The lowered operator reads them in the model's format.
        computed = note.output if rounds and fmt is not None and fmt.scaled else fmt

        def read(operand: Operand) -> fx.Node:
            if rounds and note.row is not None and operand.place in note.row.scaled:
                return self._rounded(node, operand, note)
            wanted = reader.read_as(computed, operand, self.casts.values.get(operand.node))
            return self._cast(node, operand.node, None if wanted is None else wanted.dtype)

        map_operands(node, read)
        if rounds:
            node_metadata.NOTE[node] = dataclasses.replace(note, stream=self.casts.streams.take())

    def _enter(self, node: fx.Node, body: PrecisionGraph) -> None:
        """Insert casts into the body of a higher-order operator as if it were inlined."""
        inner = _Inserter(body, self.options, (self, node))
        for placeholder, operand in operands(node, body):
            placeholder.meta["val"] = self.graph.value(operand)
        inner.run()
        body.inputs = [body.value(placeholder) for placeholder, _ in operands(node, body)]
        node.meta["val"] = tuple(body.value(result) for result in results(body))

    def _refresh(self, node: fx.Node, force: bool = False) -> None:
        """Recompute a node's fake value if an operand's value has changed."""
        if node.op not in ("call_function", "call_method") or is_switch(node):
            return
        unpacks = node.target is py_operator.getitem
        if not unpacks and not isinstance(node.target, torch._ops.OpOverload):
            return
        values, operands = self.casts.values, node.all_input_nodes
        if not force and all(self.graph.value(used) is values.get(used) for used in operands):
            return
        before = values.get(node)
        self.graph.propagate(node)
        if isinstance(before, torch.Tensor):
            self._keep_strides(node, before)

    def _keep_strides(self, node: fx.Node, before: torch.Tensor) -> None:
        """Insert a copy with the traced strides if the new format changes the strides.

        The kernel that torch selects depends on the dtype.
        """
        value, memory = self.graph.value(node), self.casts.sharing.memory
        if not isinstance(value, torch.Tensor) or same_strides(before, value) or in_place(node):
            return
        if any(memory.of(node) & memory.of(used) for used in node.all_input_nodes):
            return  # a view derives its strides from its base
        args, call_function = (node, memory_order(before)), self.graph.graph.call_function
        copy = self._after(node, lambda: call_function(torch.ops.qsync.in_order.default, args))
        node_metadata.CAST[copy] = CastInfo(Part.COPY, owner_of(node), purpose=Purpose.RESULT)

    def _rounded(self, node: fx.Node, operand: Operand, note: OperatorInfo) -> fx.Node:
        row, fmt, output = note.row, note.precision, note.output
        assert row is not None, f"{note.id} has no row"
        assert fmt is not None and output is not None, f"{note.id} was not assigned"
        if not fmt.scaled:
            return self.casts.rounded(node, operand.node, fmt, (), fmt.dtype)
        dimensions: list[int] = []
        if (lowering := self.options.lowerings.get(row.name)) is not None:
            role = tuple(Role)[row.scaled.index(operand.place)]
            per_channel = self.options.scaling == "channel"
            dimensions = (lowering.keep if per_channel else lowering.separate)(node, role)
        return self.casts.rounded(node, operand.node, fmt, tuple(dimensions), output.dtype)

    def _cast(self, node: fx.Node, used: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        if used not in writes(node):
            return self.casts.shared(node, used, dtype)
        if in_place(node) or dtype in (None, plain_type(self.graph.value(used))):
            return used
        # An operator that writes in another dtype writes to a copy, which is then written back.
        with self.graph.graph.inserting_before(node):
            copy = self.casts.convert(used, dtype, node_metadata.NOTE[node].id)
        self.copies[copy] = used
        return copy

    def _write_back(self, node: fx.Node) -> None:
        """Copy results from temporary copies into the tensors that the model writes to.

        Readers of an aliasing result of the operator then read the original tensor.
        """
        memory = self.casts.sharing.memory
        for copy, used in self.copies.items():
            with self.graph.graph.inserting_after(node):
                back = self.graph.graph.call_function(torch.ops.aten.copy_.default, (used, copy))
            self.graph.propagate(back)
            self.casts.stands_for(back, used)
            items = (user for user in node.users if user.target is py_operator.getitem)
            for result in (node, *items):
                shares = memory.of(result) & memory.of(used)
                if shares and isinstance(self.graph.value(result), torch.Tensor):
                    result.replace_all_uses_with(back)
            self.casts.sharing.passed(back)
        self.copies.clear()

    def _keep_apart(self, node: fx.Node) -> None:
        """Insert a copy for a conversion that copied in the model and now returns its input.

        The copy is needed only if either tensor is written to.
        """
        memory, source, value = self.casts.sharing.memory, node.args[0], self.graph.value
        if not isinstance(source, fx.Node) or value(node) is not value(source):
            return
        old, new = memory.of(source), memory.of(node)
        if old & new or not (old | new) & memory.written:
            return
        call_function = self.graph.graph.call_function
        copy = self._after(node, lambda: call_function(torch.ops.aten.clone.default, (node,)))
        node_metadata.CAST[copy] = CastInfo(Part.COPY, node_metadata.NOTE[node].id)

    def _output(self, node: fx.Node, note: OperatorInfo) -> None:
        value = self.graph.value(node)
        if note.output is None or not is_float(value) or in_place(node):
            return
        dtype = note.output.dtype
        if value.dtype is not dtype:
            self._after(node, lambda: self.casts.convert(node, dtype, note.id, Purpose.RESULT))

    def _after(self, node: fx.Node, make: Callable[[], fx.Node]) -> fx.Node:
        """Insert a node behind another one and redirect its users to the new node."""
        users = list(node.users)
        with self.graph.graph.inserting_after(node):
            new = make()
        self.graph.propagate(new)
        self.casts.stands_for(new, node)
        for user in users:
            user.replace_input_with(node, new)
        return new
