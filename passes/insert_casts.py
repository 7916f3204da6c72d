"""Insertion of casts: operands and outputs get the formats that their notes require.

Invariant: one cast for each tensor and format as far as `Sharing` allows, right before its first
reader; it converts the original tensor. In-place operators never write to a cast of their target.
"""

from __future__ import annotations

import dataclasses
import operator as py_operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from qsync_fx.formats import Precision, precision_of
from qsync_fx.graph import PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import (
    AliasSets,
    Places,
    Sharing,
    caller_of,
    handed_in,
    in_place,
    operands,
    results,
    writes,
)
from qsync_fx.graph.fx_utils import is_float, is_switch, memory_order, same_strides, tensors
from qsync_fx.graph.node_metadata import CastInfo, OperatorInfo, Part, Purpose
from qsync_fx.graph.operand_formats import Operand, OperandReader, map_operands
from qsync_fx.ops import Kind
from qsync_fx.passes.lowering_registry import Lowering, Role
from qsync_fx.passes.pass_base import Scope
from qsync_fx.plan.operator_id import OpId
from qsync_fx.rounding import RandomStreams, Rounding
from qsync_fx.torch_internals import OpOverload


@dataclass(frozen=True)
class InsertCasts:
    """Pass that inserts casts, shared between readers; `scaling` is "tensor" or "channel"."""

    name: ClassVar[str] = "insert_casts"
    scope: ClassVar[Scope] = Scope.MODEL

    rounding: Rounding = "stochastic"
    scaling: str = "tensor"
    lowerings: Mapping[str, Lowering] = field(default_factory=dict)

    def __call__(self, graph: PrecisionGraph) -> None:
        _Casts(graph, self, outer=None).run()


class _Casts:
    """The casts of one graph, or of one body; `own` are dtypes before any cast.

    `sharing` is the state of memory and grad mode at the node that casts are made for.
    """

    def __init__(self, graph: PrecisionGraph, options: InsertCasts, outer: _Casts | None) -> None:
        self.graph, self.options = graph, options
        self.dtypes = {node: _plain_type(graph.value(node)) for node in graph.nodes}
        self.values = {node: graph.value(node) for node in graph.nodes}
        self.streams: RandomStreams = RandomStreams()
        outer_memory: dict[fx.Node, Places] = {}
        if outer is not None:
            self.streams = outer.streams
            for placeholder, operand in operands(caller_of(graph), graph):
                if isinstance(operand, fx.Node):
                    outer_memory[placeholder] = outer.memory.of(operand)
        self.sharing: Sharing = Sharing(graph, AliasSets(graph, outer_memory))
        self.memory: AliasSets = self.sharing.memory
        self._made: dict[Any, Any] = {}
        self._copies: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in self.graph.nodes:
            self._visit(node)
            self._pass(node)
        drop_unread_casts(self.graph)
        self.graph.module.recompile()

    def _visit(self, node: fx.Node) -> None:
        if node.op == "output":
            if self.graph.parent is None:  # the readers of a body's results convert them
                self._cast_outputs(node)
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
        self._cast_operands(node, note)
        self._refresh(node, force=(node.args, node.kwargs) != before)
        self._write_back(node)
        self._keep_apart(node)
        self._cast_result(node, note)

    def _pass(self, node: fx.Node) -> None:
        """Advance past a node; share a cast that is in the graph, or replace it by a shared one."""
        is_autocast = node_metadata.has_purpose(node, Purpose.AUTOCAST)
        if node_metadata.is_part(node, Part.CONVERT) and not is_autocast:
            source: Any = node.args[0]
            key = (source, node.args[1], self.sharing.epoch(source))
            shared = self._made.setdefault(key, node)
            if shared is not node and not node_metadata.has_purpose(node, Purpose.RESULT):
                node.replace_all_uses_with(shared)
        self.sharing.passed(node)

    def _enter(self, node: fx.Node, body: PrecisionGraph) -> None:
        """Insert casts into the body of a higher-order operator as if it were inlined."""
        inner = _Casts(body, self.options, self)
        for placeholder, operand in operands(node, body):
            placeholder.meta["val"] = self.graph.value(operand)
        inner.run()
        body.inputs = [body.value(placeholder) for placeholder, _ in operands(node, body)]
        node.meta["val"] = tuple(body.value(result) for result in results(body))

    def _refresh(self, node: fx.Node, force: bool = False) -> None:
        """Recompute a node's fake value if an operand's value has changed."""
        if node.op not in ("call_function", "call_method") or is_switch(node):
            return
        value, before = self.graph.value, self.values.get(node)
        changed = any(value(used) is not self.values.get(used) for used in node.all_input_nodes)
        if not _has_value(node) or not (force or changed):
            return
        self.graph.propagate(node)
        new = value(node)
        if not isinstance(before, torch.Tensor) or not isinstance(new, torch.Tensor):
            return
        if same_strides(before, new) or in_place(node):
            return
        if any(self.memory.of(node) & self.memory.of(used) for used in node.all_input_nodes):
            return  # a view derives its strides from its base
        # The kernel that torch selects, and so the strides, depend on the dtype.
        args, in_order = (node, memory_order(before)), torch.ops.qsync.in_order.default
        copy = self._after(node, lambda: self.graph.graph.call_function(in_order, args))
        node_metadata.CAST[copy] = CastInfo(Part.COPY, _owner_of(node), purpose=Purpose.RESULT)

    def _cast_operands(self, node: fx.Node, note: OperatorInfo) -> None:
        reader, fmt = OperandReader.of(node, note, self.values[node]), note.precision
        rounds = note.kind is Kind.ADJUSTABLE and fmt is not None and not fmt.plain
        # Until `lower` runs, torch computes a scaled operator in its output format, so its other
        # operands have that format. The lowered operator reads them in the model's format.
        computed = note.output if rounds and fmt is not None and fmt.scaled else fmt

        def read(operand: Operand) -> fx.Node:
            if rounds and note.row is not None and operand.place in note.row.scaled:
                return self._rounded(node, operand, note)
            wanted = reader.read_as(computed, operand, self.values.get(operand.node))
            return self._cast_operand(node, operand.node, wanted.dtype if wanted else None)

        map_operands(node, read)
        if rounds:
            node_metadata.NOTE[node] = dataclasses.replace(note, stream=self.streams.take())

    def _cast_operand(self, node: fx.Node, used: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        if used not in writes(node):
            return self._shared(node, used, dtype)
        if in_place(node) or dtype in (None, _plain_type(self.graph.value(used))):
            return used
        # An operator that writes in another dtype writes to a copy, which is then written back.
        with self.graph.graph.inserting_before(node):
            copy = self._convert(used, dtype, _owner_of(node))
        self._copies[copy] = used
        return copy

    def _write_back(self, node: fx.Node) -> None:
        """Copy results from temporary copies into the tensors that the model writes to."""
        for copy, used in self._copies.items():
            with self.graph.graph.inserting_after(node):
                back = self.graph.graph.call_function(torch.ops.aten.copy_.default, (used, copy))
            self.graph.propagate(back)
            self._substitute(back, used)
            # Readers of an aliasing result then read the original tensor.
            items = (user for user in node.users if user.target is py_operator.getitem)
            for result in (node, *items):
                shares = self.memory.of(result) & self.memory.of(used)
                if shares and isinstance(self.graph.value(result), torch.Tensor):
                    result.replace_all_uses_with(back)
            self.sharing.passed(back)
        self._copies.clear()

    def _keep_apart(self, node: fx.Node) -> None:
        """Insert a copy for a conversion that copied in the model and now returns its input."""
        source, value = node.args[0], self.graph.value
        if not isinstance(source, fx.Node) or value(node) is not value(source):
            return
        old, new = self.memory.of(source), self.memory.of(node)
        if old & new or not (old | new) & self.memory.written:
            return
        clone = torch.ops.aten.clone.default
        copy = self._after(node, lambda: self.graph.graph.call_function(clone, (node,)))
        node_metadata.CAST[copy] = CastInfo(Part.COPY, _owner_of(node))

    def _cast_result(self, node: fx.Node, note: OperatorInfo) -> None:
        value = self.graph.value(node)
        if note.output is None or not is_float(value) or in_place(node):
            return
        dtype = note.output.dtype
        if value.dtype is not dtype:
            self._after(node, lambda: self._convert(node, dtype, note.id, Purpose.RESULT))

    def _after(self, node: fx.Node, make: Callable[[], fx.Node]) -> fx.Node:
        """Insert a node behind another one and redirect its users to the new node."""
        users = list(node.users)
        with self.graph.graph.inserting_after(node):
            new = make()
        self.graph.propagate(new)
        self._substitute(new, node)
        for user in users:
            user.replace_input_with(node, new)
        return new

    def _substitute(self, new: fx.Node, node: fx.Node) -> None:
        """Treat a new node as the original `node` from here on: same dtype and memory."""
        self.dtypes[new], self.values[new] = self.dtypes[node], self.values[node]
        self.memory.put(new, instead_of=node)

    def _shared(self, before: fx.Node, used: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """Return `used` converted to `dtype`, by a new cast before `before` or an earlier cast."""
        value = self.graph.value(used)
        if dtype is None or _plain_type(value) is None:
            return used
        origin = self.sharing.origin(used)
        if _plain_type(self.graph.value(origin)) is dtype:
            return origin
        # Shared casts replace casts of autocast.
        if value.dtype is dtype and not node_metadata.has_purpose(used, Purpose.AUTOCAST):
            return used
        key = (origin, dtype, self.sharing.epoch(origin))
        if key not in self._made:
            with self.graph.graph.inserting_before(before):
                self._made[key] = self._convert(origin, dtype, _owner_of(before))
        return cast(fx.Node, self._made[key])

    def _rounded(self, node: fx.Node, operand: Operand, note: OperatorInfo) -> fx.Node:
        """Return a factor of `node` rounded to the grid of a format that is not plain."""
        row, fmt, output = note.row, note.precision, note.output
        assert row is not None and fmt is not None and output is not None, "it was assigned"
        dimensions: list[int] = []  # with one scale per index
        if fmt.scaled and (lowering := self.options.lowerings.get(row.name)) is not None:
            role = tuple(Role)[row.scaled.index(operand.place)]
            per_channel = self.options.scaling == "channel"
            dimensions = (lowering.keep if per_channel else lowering.separate)(node, role)
        source, dtype = self.sharing.origin(operand.node), output.dtype
        key = (source, fmt.name, tuple(dimensions), self.sharing.epoch(source))
        with self.graph.graph.inserting_before(node):
            if key not in self._made:
                self._made[key] = self._round(source, fmt, dimensions, note.id)
            rounded: Any = self._made[key]
            if not fmt.scaled:
                return cast(fx.Node, rounded)
            if (key, dtype) not in self._made:
                args = (*rounded, dtype)
                info = CastInfo(Part.DEQUANTIZE, note.id, precision_of(dtype))
                name = f"{source.name}_{fmt}_{precision_of(dtype)}"
                dequantize = torch.ops.qsync.dequantize.default
                self._made[key, dtype] = self._call(dequantize, args, name, source, info)
        return cast(fx.Node, self._made[key, dtype])

    def _round(self, source: fx.Node, fmt: Precision, dimensions: list[int], owner: OpId) -> Any:
        """Insert a rounding; return its node, or the nodes of values and scale."""
        stream, name = self.streams.take(), f"{source.name}_{fmt}"
        seed = seed_node(self.graph, self.options.rounding)
        args: tuple[Any, ...] = (source, seed, stream, fmt.name, self.options.rounding)
        if not fmt.scaled:
            info = CastInfo(Part.ROUND, owner, fmt, stream)
            return self._call(torch.ops.qsync.round.default, args, name, source, info)
        info, args = CastInfo(Part.QUANTIZE, owner, fmt, stream), (*args, dimensions)
        pair = self._call(torch.ops.qsync.quantize.default, args, name, source, info)

        def item(index: int, suffix: str, part: Part) -> fx.Node:
            args, info = (pair, index), CastInfo(part, owner, fmt)
            return self._call(py_operator.getitem, args, f"{pair.name}_{suffix}", source, info)

        return item(0, "q", Part.VALUES), item(1, "scale", Part.SCALE)

    def _convert(
        self,
        source: fx.Node,
        dtype: torch.dtype,
        owner: OpId | None,
        purpose: Purpose = Purpose.OPERAND,
    ) -> fx.Node:
        """Insert a conversion at the graph's insertion point and return it."""
        fmt = precision_of(dtype)
        info = CastInfo(Part.CONVERT, owner, fmt, purpose=purpose)
        convert = torch.ops.aten.to.dtype
        return self._call(convert, (source, dtype), f"{source.name}_{fmt}", source, info)

    def _call(
        self, target: Any, args: tuple[Any, ...], name: str, source: fx.Node, info: CastInfo
    ) -> fx.Node:
        """Insert a cast of `source` at the graph's insertion point and return it."""
        new = self.graph.graph.create_node("call_function", target, args, name=name)
        node_metadata.CAST[new] = info
        self._describe(new, source)
        return new

    def _describe(self, new: fx.Node, source: fx.Node) -> None:
        for key in source.meta.keys() & {"stack_trace", "nn_module_stack"}:
            new.meta[key] = source.meta[key]
        self.graph.propagate(new)
        self.dtypes.setdefault(new, self.dtypes.get(source))
        self.values.setdefault(new, self.values.get(source))

    def _cast_outputs(self, output: fx.Node) -> None:
        """Cast the graph's outputs to the dtypes that Dynamo expects, and preserve their aliasing.

        Outputs that share memory in the model share it here: a write to one is visible in the
        others, and in their gradients. If several outputs are views of a tensor in another format,
        that tensor is cast once and its views are repeated on the cast.
        """
        places = (place for used in output.all_input_nodes for place in self.memory.of(used))
        sharers: Counter[Hashable] = Counter(places)
        repeated: dict[fx.Node, fx.Node] = {}

        def restored(used: fx.Node) -> fx.Node:
            owned, value = self.dtypes.get(used), self.graph.value(used)
            alone = all(sharers[place] == 1 for place in self.memory.of(used))
            if alone or owned is None or not is_float(value) or value.dtype is owned:
                return self._shared(output, used, owned)
            return repeat(used, owned)

        def repeat(node: fx.Node, dtype: torch.dtype) -> fx.Node:
            if node not in repeated:
                viewed = self._viewed(node)
                if viewed is None:
                    repeated[node] = self._shared(output, node, dtype)
                elif in_place(node):
                    repeated[node] = repeat(viewed, dtype)
                else:
                    base, name = repeat(viewed, dtype), f"{node.name}_{precision_of(dtype)}"
                    with self.graph.graph.inserting_before(output):
                        new = self.graph.graph.create_node(
                            node.op, node.target, node.args, node.kwargs, name=name
                        )
                    new.replace_input_with(viewed, base)
                    self._describe(new, node)
                    repeated[node] = new
            return repeated[node]

        output.args = fx.node.map_arg(output.args, restored)

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """Return the input whose memory and dtype a node's value has; None for other values."""
        if node.op != "call_function" or node_metadata.is_cast(node):
            return None
        if in_place(node):
            return writes(node)[0]

        def dtypes(node: fx.Node) -> set[torch.dtype]:
            return {t.dtype for t in tensors(self.graph.value(node))}

        for used in node.all_input_nodes if _has_value(node) else ():
            if dtypes(used) == dtypes(node) and self.memory.of(used) & self.memory.of(node):
                return used
        return None


def seed_node(graph: PrecisionGraph, rounding: Rounding) -> fx.Node:
    """Return the node of the step's random number, zero unless rounding is stochastic.

    Bodies receive it as an additional operand, so that recomputation rounds identically.
    """
    if graph.parent is not None:
        return handed_in(graph, seed_node(graph.parent, rounding), "seed")
    device = graph.context.device
    target: Any = torch.ops.aten.zeros.default
    args: tuple[Any, ...] = ([1],)
    options: dict[str, Any] = {"dtype": torch.int64, "device": device}
    if rounding == "stochastic":
        target, args, options = torch.ops.qsync.draw.default, (device,), {}
    for node in graph.nodes:
        if node_metadata.is_part(node, Part.SEED) and node.target is target:
            return node
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.graph.inserting_before(first):
        seed = graph.graph.create_node("call_function", target, args, options, name="seed")
    node_metadata.CAST[seed] = CastInfo(Part.SEED, None)
    seed.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    graph.propagate(seed)
    return seed


def drop_unread_casts(graph: PrecisionGraph) -> None:
    """Erase unused casts, and only casts: unused nodes of the model stay, in bodies too."""
    for node in reversed(graph.nodes):
        if node_metadata.is_cast(node) and not node.users:
            graph.graph.erase_node(node)


def _owner_of(reader: fx.Node) -> OpId | None:
    """Return the operator that a cast is made for; None for a cast of a graph output."""
    note = node_metadata.NOTE.get(reader)
    return note.id if note else None


def _plain_type(value: Any) -> torch.dtype | None:
    """Return the dtype of a floating-point tensor that a plan may change; None for other values."""
    return value.dtype if is_float(value) else None


def _has_value(node: fx.Node) -> bool:
    """Return whether a node unpacks a result or calls an operator."""
    is_operator = isinstance(node.target, OpOverload)
    return is_operator or node.target is py_operator.getitem
