"""One explicit cast a (tensor, format), shared by its consumers; inverse pairs cancel.

Invariant: afterwards every operator gets operands of the format its note asks for, every graph output has the type that Dynamo expects,
and each value in `meta["val"]` is what torch computes for the rewritten graph. Casts to plain formats are conversions, which autograd
differentiates. Casts to scaled formats are `qsync::quantize`, followed by `qsync::dequantize` so that the graph stays well typed; `lower`
fuses both into the operator. A cast stands right before its first consumer and is shared no further than the next write in place or
switch of grad mode, across which it would hold a stale value or lose the gradient.
"""

from __future__ import annotations

import functools
import operator as py_operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import PrecisionGraph
from qsync_fx.notes import Note
from qsync_fx.ops import Kind, OperatorRow
from qsync_fx.passes.bodies import operands, results
from qsync_fx.passes.inplace import in_place, writes
from qsync_fx.passes.lowering import Lowering, Role
from qsync_fx.passes.retrace import is_switch
from qsync_fx.passes.seed import drawn, handed_in
from qsync_fx.precision import Precision, precision_of
from qsync_fx.values import format_of, is_float


@dataclass(frozen=True)
class InsertCasts:
    """
    Attributes:
        rounding: "stochastic", "nearest" or "floor", of formats that are rounded by `qsync::` operators.
        scaling: "tensor" or "channel".
        lowerings: say what per-channel scaling means for an operator.
    """

    rounding: str = "stochastic"
    scaling: str = "tensor"
    lowerings: Mapping[str, Lowering] = field(default_factory=dict)
    name: str = "insert_casts"

    def __call__(self, graph: PrecisionGraph) -> None:
        if graph.parent is None:
            _Inserter(graph, self).run()


def _is_impure(node: fx.Node) -> bool:
    """Only casts may die here: what the model computes and drops is its own affair."""
    return not node.meta.get("qsync_cast", False)


class _Inserter:
    def __init__(
        self, graph: PrecisionGraph, options: InsertCasts, outer: tuple[_Inserter, fx.Node] | None = None
    ) -> None:
        self.graph, self.options, self.outer = graph, options, outer
        self.whole: _Inserter = outer[0].whole if outer is not None else self
        # Types as the model wrote them: what fixed operators and graph outputs get back.
        self.own = {node: _dtype(graph.value(node)) for node in graph.nodes}
        self.values = {node: graph.value(node) for node in graph.nodes}
        self.unwritten = not any(in_place(node) for node in graph.nodes)
        self.epoch = 0
        self.made: dict[Any, Any] = {}
        self.seed: fx.Node | None = None
        self.streams = self.products = 0

    def run(self) -> None:
        for node in self.graph.nodes:
            self.visit(node)
        self.graph.graph.eliminate_dead_code(_is_impure)
        self.graph.module.recompile()

    def visit(self, node: fx.Node) -> None:
        if node.op == "output" and self.outer is not None:
            return  # whoever reads a body's results converts them
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, lambda used: self.cast(node, used, self.own.get(used)))
            return
        if is_switch(node) or writes(node):
            # A batch norm that updates its statistics writes too; that its neighbours share no cast across it costs little.
            self.epoch += 1
        note: Note | None = node.meta.get("qsync")
        if note is None:
            self._refresh(node)
            return
        row = note.row
        before = (node.args, node.kwargs)
        if bodies := node.meta.get("qsync_bodies"):
            for body in bodies:
                self._enter(node, body)
            return
        if note.kind is Kind.ADJUSTABLE and row is not None:
            self._adjustable(node, note, row)
        elif in_place(node):
            written = writes(node)[0]
            to = _dtype(self.graph.value(written))
            self._map(node, lambda used: used if used is written else self.cast(node, used, to))
        elif row is not None and row.converts:
            pass
        elif note.kind is Kind.DEPENDENT and note.precision is not None:
            self._map(node, functools.partial(self._promote, node, note.precision))
        else:
            own = format_of(self.values[node])
            wider = note.precision.dtype if note.precision is not None and note.precision is not own else None
            self._map(node, lambda used: self.cast(node, used, wider or self.own.get(used)))
        self._refresh(node, force=(node.args, node.kwargs) != before)
        self._output(node, note)

    def _enter(self, node: fx.Node, body: PrecisionGraph) -> None:
        """Goes through the body of a higher-order operator as if it stood here."""
        inner = _Inserter(body, self.options, (self, node))
        for placeholder, operand in operands(node, body):
            placeholder.meta["val"] = self.graph.value(operand)
        inner.run()
        body.inputs = [body.value(placeholder) for placeholder, _ in operands(node, body)]
        node.meta["val"] = tuple(body.value(result) for result in results(body))

    def _map(self, node: fx.Node, change: Callable[[fx.Node], fx.Node]) -> None:
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), change)

    def _refresh(self, node: fx.Node, force: bool = False) -> None:
        """Computes a node's value anew if an operand's has changed."""
        if node.op not in ("call_function", "call_method") or is_switch(node):
            return
        changed = any(self.graph.value(used) is not self.values.get(used) for used in node.all_input_nodes)
        if not (force or changed) or (
            not isinstance(node.target, torch._ops.OpOverload) and node.target is not py_operator.getitem
        ):
            return
        self.graph.propagate(node)

    # What each kind of operator gets.

    def _adjustable(self, node: fx.Node, note: Note, row: OperatorRow) -> None:
        fmt = note.precision
        assert fmt is not None and note.output is not None, f"{note.id} was not assigned"
        if row.output_only:
            self._map(node, lambda used: self.cast(node, used, self.own.get(used)))
            return
        if not fmt.plain:
            node.meta["qsync_stream"], self.whole.products = self.whole.products, self.whole.products + 1
        special: dict[int, Role] = {} if fmt.plain else {row.scaled[0]: "activation", row.scaled[1]: "weight"}
        dtype = note.output.dtype if fmt.scaled else fmt.dtype
        args: list[Any] = list(node.args)
        for at, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            given: Any = args[at] if at < len(args) else node.kwargs.get(argument.name)
            if given is None:
                continue
            if at in special:
                new: Any = self._special(node, given, fmt, row, special[at], dtype)
            elif at in row.converted(node.args):
                new = fx.node.map_arg(given, lambda used: self.cast(node, used, dtype))
            else:
                new = fx.node.map_arg(given, lambda used: self.cast(node, used, self.own.get(used)))
            if at < len(args):
                args[at] = new
            else:
                node.kwargs = {**node.kwargs, argument.name: new}
        node.args = tuple(args)

    def _promote(self, node: fx.Node, fmt: Precision, used: fx.Node) -> fx.Node:
        value = self.graph.value(used)
        return used if is_float(value) and value.dim() == 0 else self.cast(node, used, fmt.dtype)

    def _output(self, node: fx.Node, note: Note) -> None:
        """Converts a result that is not in the format that the note promises."""
        value = self.graph.value(node)
        if note.output is None or not is_float(value) or value.dtype is note.output.dtype or in_place(node):
            return
        users = list(node.users)
        with self.graph.graph.inserting_after(node):
            cast = self._convert(node, note.output.dtype)
        cast.meta["qsync_output"] = True
        for user in users:
            user.replace_input_with(node, cast)
        self.own[cast], self.values[cast] = self.own[node], self.values[node]

    # Casts.

    def cast(self, before: fx.Node, used: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """Returns `used` converted to `dtype`, by a new cast before `before` or one made earlier."""
        value = self.graph.value(used)
        if dtype is None or not is_float(value) or precision_of(value.dtype) is None:
            return used
        origin = self._origin(used)
        if _dtype(self.graph.value(origin)) is dtype:
            return origin
        if value.dtype is dtype and "qsync_autocast" not in used.meta:  # those give way to casts that are shared
            return used
        key = (origin, dtype, self.epoch)
        if key not in self.made:
            with self.graph.graph.inserting_before(before):
                self.made[key] = self._convert(origin, dtype)
        made: fx.Node = self.made[key]
        return made

    def _origin(self, node: fx.Node) -> fx.Node:
        """Sees through casts that lose nothing, and those that only autocast asked for: what follows converts the original."""
        while self._is_conversion(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            before, after = self.graph.value(source), self.graph.value(node)
            lossless = is_float(before) and torch.promote_types(before.dtype, after.dtype) is after.dtype
            if not lossless and not node.meta.get("qsync_autocast"):
                break
            node = source
        return node

    def _is_conversion(self, node: fx.Node) -> bool:
        # A conversion of the model's own may be there to copy what is written to later.
        ours = node.meta.get("qsync_cast", False) or self.unwritten
        return ours and node.target is torch.ops.aten.to.dtype and is_float(self.graph.value(node))

    def _convert(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        found = precision_of(dtype)
        cast = self.graph.graph.create_node(
            "call_function", torch.ops.aten.to.dtype, (source, dtype), name=f"{source.name}_{found}"
        )
        self._describe(cast, source)
        return cast

    def _describe(self, cast: fx.Node, source: fx.Node) -> None:
        cast.meta["qsync_cast"] = True
        for key in ("stack_trace", "nn_module_stack"):
            if key in source.meta:
                cast.meta[key] = source.meta[key]
        self.graph.propagate(cast)
        self.own.setdefault(cast, self.own.get(source))

    def _special(
        self, node: fx.Node, used: fx.Node, fmt: Precision, row: OperatorRow, role: Role, dtype: torch.dtype
    ) -> fx.Node:
        """Returns `used` on the grid of a format that is not plain, as values of `dtype`."""
        source = self._origin(used)
        keep: tuple[int, ...] = ()
        if fmt.scaled and self.options.scaling == "channel" and row.name in self.options.lowerings:
            keep = tuple(self.options.lowerings[row.name].keep(node, role))
        key = (source, fmt.name, keep, self.epoch)
        graph = self.graph.graph
        with graph.inserting_before(node):
            if key not in self.made:
                self.made[key] = self._rounded(source, fmt, keep)
            if not fmt.scaled:
                rounded: fx.Node = self.made[key]
                return rounded
            quantized, scale = self.made[key]
            if (key, dtype) not in self.made:
                self.made[key, dtype] = graph.create_node(
                    "call_function",
                    torch.ops.qsync.dequantize.default,
                    (quantized, scale, dtype),
                    name=f"{source.name}_{fmt}_{precision_of(dtype)}",
                )
                self._describe(self.made[key, dtype], source)
        dequantized: fx.Node = self.made[key, dtype]
        return dequantized

    def _rounded(self, source: fx.Node, fmt: Precision, keep: tuple[int, ...]) -> Any:
        graph = self.graph.graph
        stream, self.whole.streams = self.whole.streams, self.whole.streams + 1
        if not fmt.scaled:
            rounded = graph.create_node(
                "call_function",
                torch.ops.qsync.round.default,
                (source, self._seed(), stream, fmt.name, self.options.rounding),
                name=f"{source.name}_{fmt}",
            )
            self._describe(rounded, source)
            return rounded
        pair = graph.create_node(
            "call_function",
            torch.ops.qsync.quantize.default,
            (source, self._seed(), stream, fmt.name, self.options.rounding, list(keep)),
            name=f"{source.name}_{fmt}",
        )
        self._describe(pair, source)
        parts = tuple(
            graph.create_node("call_function", py_operator.getitem, (pair, at), name=f"{pair.name}_{part}")
            for at, part in enumerate(("q", "scale"))
        )
        for part in parts:
            self._describe(part, source)
        return parts

    def _seed(self) -> fx.Node:
        if self.seed is None:
            if self.outer is None:
                self.seed = drawn(self.graph, self.options.rounding)
            else:
                around, node = self.outer
                self.seed = handed_in(self.graph, node, around._seed())
        return self.seed


def _dtype(value: Any) -> torch.dtype | None:
    """The type of a floating-point tensor in a format that we know; None for everything else."""
    return value.dtype if is_float(value) and format_of(value) is not None else None
