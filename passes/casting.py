"""Casts of operands, results and graph outputs, and the random seed of their roundings.

Invariant: one cast for each tensor and format as far as `Sharing` allows, right before its first
reader; it converts the original tensor, skipping lossless conversions. A cast to a plain format is
a conversion, which autograd differentiates; to a scaled format, `qsync::quantize` followed by
`qsync::dequantize`, so that dtypes stay consistent; to any other format, `qsync::round`.

Stochastic rounding uses one random number per graph and step (`qsync_fx.rounding`), and a separate
stream per rounding. Recomputation rounds identically: bodies receive the number as an additional
operand, and it is always saved for backward.
"""

from __future__ import annotations

import functools
import operator as py_operator
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from qsync_fx.formats import Precision, precision_of
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import (
    AliasSets,
    Places,
    Sharing,
    handed_in,
    in_place,
    operands,
    writes,
)
from qsync_fx.graph.fx_utils import is_float, tensors
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.node_metadata import CastInfo, Part, Purpose
from qsync_fx.plan.operator_id import OpId
from qsync_fx.rounding import RandomStreams, Rounding


def drawn(graph: PrecisionGraph, rounding: Rounding) -> fx.Node:
    """Insert a node that draws the step's random number, or zero unless rounding is stochastic."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    device = graph.context.device
    create = functools.partial(graph.graph.create_node, "call_function", name="seed")
    with graph.graph.inserting_before(first):
        if rounding == "stochastic":
            seed = create(torch.ops.qsync.draw.default, (device,))
        else:
            options: dict[str, Any] = {"dtype": torch.int64, "device": device}
            seed = create(torch.ops.aten.zeros.default, ([1],), options)
    node_metadata.CAST[seed] = CastInfo(Part.SEED, None)
    seed.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    graph.propagate(seed)
    return seed


class Casts:
    """The casts of one graph, or of one body of a graph.

    Attributes:
        own: original dtypes of floating-point values, restored for fixed operators and graph
            outputs.
        sharing: memory and grad-mode state at the node that casts are made for.
        streams: source of one stream per rounding, shared by a graph and its bodies.
    """

    def __init__(
        self,
        graph: PrecisionGraph,
        rounding: Rounding = "nearest",
        outer: tuple[Casts, fx.Node] | None = None,
    ) -> None:
        self.graph, self.rounding, self.outer = graph, rounding, outer
        self.own = {node: plain_type(graph.value(node)) for node in graph.nodes}
        self.values = {node: graph.value(node) for node in graph.nodes}
        self.sharing: Sharing = Sharing(graph, AliasSets(graph, self._given()))
        self._made: dict[Any, Any] = {}
        self._seed: fx.Node | None = None
        self.streams: RandomStreams = outer[0].streams if outer else RandomStreams()

    def passed(self, node: fx.Node) -> None:
        """Advance past a node; share a cast that is in the graph, or replace it by a shared one."""
        is_autocast = node_metadata.has_purpose(node, Purpose.AUTOCAST)
        if node_metadata.is_part(node, Part.CONVERT) and not is_autocast:
            source: Any = node.args[0]
            key = (source, node.args[1], self.sharing.epoch(source))
            shared = self._made.setdefault(key, node)
            if shared is not node and not node_metadata.has_purpose(node, Purpose.RESULT):
                node.replace_all_uses_with(shared)
        self.sharing.passed(node)

    def _given(self) -> dict[fx.Node, Places]:
        """Return the memory of a body's operands outside of it."""
        if self.outer is None:
            return {}
        around, node = self.outer
        pairs = operands(node, self.graph)
        memory = around.sharing.memory
        return {inner: memory.of(used) for inner, used in pairs if isinstance(used, fx.Node)}

    def shared(self, before: fx.Node, used: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """Return `used` converted to `dtype`, by a new cast before `before` or an earlier cast."""
        value = self.graph.value(used)
        if dtype is None or plain_type(value) is None:
            return used
        origin = self.sharing.origin(used)
        if plain_type(self.graph.value(origin)) is dtype:
            return origin
        # Shared casts replace casts of autocast.
        if value.dtype is dtype and not node_metadata.has_purpose(used, Purpose.AUTOCAST):
            return used
        key = (origin, dtype, self.sharing.epoch(origin))
        if key not in self._made:
            with self.graph.graph.inserting_before(before):
                self._made[key] = self.convert(origin, dtype, owner_of(before))
        made: fx.Node = self._made[key]
        return made

    def rounded(
        self,
        before: fx.Node,
        used: fx.Node,
        fmt: Precision,
        keep: tuple[int, ...],
        dtype: torch.dtype,
    ) -> fx.Node:
        """Return `used` rounded to the grid of a format that is not plain.

        Args:
            keep: dimensions with one scale per index.
            dtype: dtype of the result.
        """
        source, owner = self.sharing.origin(used), owner_of(before)
        key = (source, fmt.name, keep, self.sharing.epoch(source))
        with self.graph.graph.inserting_before(before):
            if key not in self._made:
                self._made[key] = self._round(source, fmt, keep, owner)
            if fmt.scaled and (key, dtype) not in self._made:
                target, args = torch.ops.qsync.dequantize.default, (*self._made[key], dtype)
                info = CastInfo(Part.DEQUANTIZE, owner, precision_of(dtype))
                name = f"{source.name}_{fmt}_{precision_of(dtype)}"
                self._made[key, dtype] = self._call(target, args, name, source, info)
        result: fx.Node = self._made[(key, dtype) if fmt.scaled else key]
        return result

    def convert(
        self,
        source: fx.Node,
        dtype: torch.dtype,
        owner: OpId | None,
        purpose: Purpose = Purpose.OPERAND,
    ) -> fx.Node:
        """Insert a conversion at the graph's insertion point and return it."""
        fmt = precision_of(dtype)
        info = CastInfo(Part.CONVERT, owner, fmt, purpose=purpose)
        name = f"{source.name}_{fmt}"
        return self._call(torch.ops.aten.to.dtype, (source, dtype), name, source, info)

    def again(self, node: fx.Node, operand: fx.Node, instead: fx.Node) -> fx.Node:
        """Insert a copy of `node` at the insertion point that reads `instead` for `operand`."""
        fmt = precision_of(tensors(self.graph.value(instead))[0].dtype)
        new = self.graph.graph.create_node(
            "call_function", node.target, node.args, node.kwargs, name=f"{node.name}_{fmt}"
        )
        new.replace_input_with(operand, instead)
        self._describe(new, node, None)
        return new

    def stands_for(self, new: fx.Node, node: fx.Node) -> None:
        """Treat a new node as the original `node` from here on: same dtype and memory."""
        self.own[new], self.values[new] = self.own[node], self.values[node]
        self.sharing.memory.put(new, instead_of=node)

    def _call(
        self, target: Any, args: tuple[Any, ...], name: str, source: fx.Node, cast: CastInfo
    ) -> fx.Node:
        """Insert a cast of `source` at the graph's insertion point and return it."""
        new = self.graph.graph.create_node("call_function", target, args, name=name)
        self._describe(new, source, cast)
        return new

    def _describe(self, new: fx.Node, source: fx.Node, cast: CastInfo | None) -> None:
        if cast is not None:
            node_metadata.CAST[new] = cast
        for key in ("stack_trace", "nn_module_stack"):
            if key in source.meta:
                new.meta[key] = source.meta[key]
        self.graph.propagate(new)
        self.own.setdefault(new, self.own.get(source))
        self.values.setdefault(new, self.values.get(source))

    def _round(
        self, source: fx.Node, fmt: Precision, keep: tuple[int, ...], owner: OpId | None
    ) -> Any:
        stream, name = self.streams.take(), f"{source.name}_{fmt}"
        args: tuple[Any, ...] = (source, self._seed_node(), stream, fmt.name, self.rounding)
        if not fmt.scaled:
            info = CastInfo(Part.ROUND, owner, fmt, stream)
            return self._call(torch.ops.qsync.round.default, args, name, source, info)
        info = CastInfo(Part.QUANTIZE, owner, fmt, stream)
        args = (*args, list(keep))
        pair = self._call(torch.ops.qsync.quantize.default, args, name, source, info)
        parts = enumerate({"q": Part.VALUES, "scale": Part.SCALE}.items())
        return tuple(
            self._call(
                target=py_operator.getitem,
                args=(pair, index),
                name=f"{pair.name}_{suffix}",
                source=source,
                cast=CastInfo(part, owner, fmt),
            )
            for index, (suffix, part) in parts
        )

    def _seed_node(self) -> fx.Node:
        if self._seed is None:
            if self.outer is None:
                self._seed = drawn(self.graph, self.rounding)
            else:
                around, node = self.outer
                self._seed = handed_in(self.graph, node, around._seed_node(), "seed")
        return self._seed


def owner_of(reader: fx.Node) -> OpId | None:
    """Return the operator that a cast is made for; None for a cast of a graph output."""
    if reader not in node_metadata.NOTE:
        return None
    return node_metadata.NOTE[reader].id


def plain_type(value: Any) -> torch.dtype | None:
    """Return the dtype of a floating-point tensor that a plan may change; None for other values."""
    return value.dtype if is_float(value) else None


def drop_unread_casts(graph: PrecisionGraph) -> None:
    """Erase unused casts, and only casts: unused nodes of the model stay, in bodies too."""
    for node in reversed(graph.nodes):
        if node_metadata.is_cast(node) and not node.users:
            graph.graph.erase_node(node)


def cast_outputs(casts: Casts, output: fx.Node) -> None:
    """Cast the graph's outputs to the dtypes that Dynamo expects, and preserve their aliasing.

    Outputs that share memory in the model share it here: a write to one is visible in the others,
    and in their gradients. If several outputs are views of a tensor in another format, that tensor
    is cast once and its views are repeated on the cast.
    """
    memory = casts.sharing.memory
    returned = output.all_input_nodes
    sharers: Counter[Hashable] = Counter(place for used in returned for place in memory.of(used))
    repeated: dict[fx.Node, fx.Node] = {}

    def cast(used: fx.Node) -> fx.Node:
        owned = casts.own.get(used)
        value = casts.graph.value(used)
        alone = all(sharers[place] == 1 for place in memory.of(used))
        if alone or owned is None or not is_float(value) or value.dtype is owned:
            return casts.shared(output, used, owned)
        return repeat(used, owned)

    def repeat(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node not in repeated:
            viewed = _viewed(casts, node)
            if viewed is None:
                repeated[node] = casts.shared(output, node, dtype)
            elif in_place(node):
                repeated[node] = repeat(viewed, dtype)
            else:
                base = repeat(viewed, dtype)
                with casts.graph.graph.inserting_before(output):
                    repeated[node] = casts.again(node, viewed, base)
        return repeated[node]

    output.args = fx.node.map_arg(output.args, cast)


def _viewed(casts: Casts, node: fx.Node) -> fx.Node | None:
    """Return the input whose memory and dtype a node's value has; None for other values."""
    memory = casts.sharing.memory
    if node.op != "call_function" or node_metadata.is_cast(node):
        return None
    if in_place(node):
        return writes(node)[0]
    unpacks = node.target is py_operator.getitem
    if not unpacks and not isinstance(node.target, torch._ops.OpOverload):
        return None
    dtypes = {t.dtype for t in tensors(casts.graph.value(node))}
    for used in node.all_input_nodes:
        same_dtypes = {t.dtype for t in tensors(casts.graph.value(used))} == dtypes
        if same_dtypes and memory.of(used) & memory.of(node):
            return used
    return None
