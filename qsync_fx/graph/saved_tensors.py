"""Data flow of a graph: origins of tensors, gradients, and tensors saved for backward.

It is read from a graph before casts are inserted and skips nodes between an operator and its
reader. Several views are one tensor, named after the node that made it. The saved tensors come from
autograd: each operator runs on fake operands with saved-tensor hooks, and computes no values.
"""

from __future__ import annotations

import operator as py_operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from qsync_fx.devices.format_support import ANY, capability, default_precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import AliasSets, operands as body_operands, result_of
from qsync_fx.graph.fx_utils import (
    FakeRun,
    expression,
    format_of,
    function_name,
    is_float,
    storage_of,
    switches_grad,
    tensors,
)
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.operand_formats import Operand, OperandReader, OperandState, operands
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import OpId

FUSED: Final = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT: Final = 4
"""Index of the dropout probability among the arguments."""
MOST_TOKENS: Final = 512
"""Maximum number of tokens for attention as products; the geometric mean if lengths differ.

On the CPU in BF16, forward and backward of the compiled products took 0.25 to 0.64 of the fused
kernel's time up to 512 tokens and as long at 1,024 (`benchmarks/kernels/attention.py`). The
products save the weights, which the kernel recomputes.
"""


def as_products(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    need: bool,
    device: torch.device,
    options: Options,
) -> bool:
    """Return whether a call is attention that is computed as products.

    Lowering and the prediction of saved tensors both call this function. It accepts only the
    measured case: training in BF16 on a CPU with native support for it, compiled by Inductor,
    without mask and dropout, of static sizes.

    Args:
        args, kwargs: arguments of the call, with tensors in its compute dtype.
        need: whether a gradient flows back to an operand.
    """
    if target is not FUSED or not need or options.activation_recompute:
        return False
    if options.inner_backend != "inductor" or device.type != "cpu" or capability(device) != ANY:
        return False
    query, key = args[:2]
    rest = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    if any(rest.get(name) for name in ("dropout_p", "is_causal", "enable_gqa")):
        return False
    if rest.get("attn_mask") is not None:
        return False
    # A CPU's default format has 16 bits only if the CPU supports it natively.
    fast = default_precision(device)
    if fast.bits != 16 or any(format_of(t) is not fast or t.dim() != 4 for t in args[:3]):
        return False
    lengths = query.shape[-2], key.shape[-2]
    if not all(isinstance(length, int) for length in lengths):
        return False
    return bool(lengths[0] * lengths[1] <= MOST_TOKENS**2)


def without_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of fused attention, without dropout."""
    drops = args[_DROPOUT : _DROPOUT + 1]
    rest = {name: value for name, value in kwargs.items() if name != "dropout_p"}
    return (*args[:_DROPOUT], *(0.0 for _ in drops), *args[_DROPOUT + 1 :]), rest


def products(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Compute attention as two products; scores have the operands' dtype, the softmax is FP32."""
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = query @ key.transpose(-2, -1)
    # Bitwise equal to scaling in 16 bits, whose pattern Inductor fuses back to the kernel for a
    # batch of one sequence.
    scaled = (scores.float() * scale).to(scores.dtype)
    return torch.softmax(scaled, -1) @ value


@dataclass(frozen=True)
class Extra:
    """A tensor that only the backward pass reads: a mask, a mean."""

    numel: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class SavedRead:
    """A tensor operand as an operator reads it.

    Attributes:
        value: fake tensors with its sizes and strides.
        dtype: the dtype in which it is read; None for its own dtype.
        need: whether it needs a gradient.
    """

    value: Any
    dtype: torch.dtype | None
    need: bool


@dataclass(frozen=True)
class SavedTensors:
    """Tensors that an operator saves for backward.

    Attributes:
        differentiable: whether the operator's result has a gradient.
        operands: indices of saved operands among the operator's tensor operands.
        results: indices of saved results.
        extras: other saved tensors.
    """

    differentiable: bool = False
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extras: tuple[Extra, ...] = ()


class Autograd:
    """Saved tensors of operators according to autograd, cached by operator, dtypes and sizes."""

    def __init__(self, mode: FakeTensorMode | None, device: torch.device, options: Options) -> None:
        self._mode, self._device, self._options = mode, device, options
        self._known: dict[Hashable, SavedTensors] = {}

    def kept(self, node: fx.Node, reads: Mapping[fx.Node, SavedRead]) -> SavedTensors:
        """Return the tensors that a call of an ATen operator saves for the given reads."""
        if not any(read.need for read in reads.values()) or not isinstance(
            node.target, torch._ops.OpOverload
        ):
            return SavedTensors()
        places = {used: index for index, used in enumerate(reads)}
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda used: f"%{places[used]}")
        key = node.target, str(arguments), tuple(map(_outline, reads.values()))
        if key not in self._known:
            self._known[key] = self._ask(node, reads)
        return self._known[key]

    def _ask(self, node: fx.Node, reads: Mapping[fx.Node, SavedRead]) -> SavedTensors:
        visited: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            visited.append(tensor)
            return tensor

        with FakeRun(
            self._mode, torch.enable_grad(), torch.autocast(self._device.type, enabled=False)
        ):
            operands = {used: _stand_in(read.value, read) for used, read in reads.items()}
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
            call: Any = node.target
            needed = any(read.need for read in reads.values())
            if as_products(node.target, args, kwargs, needed, self._device, self._options):
                call, args, kwargs = products, (*args[:3], kwargs.get("scale")), {}
            elif (
                node.target is FUSED
                and self._device.type == "cpu"
                and capability(self._device) != ANY
            ):
                # The CPU represents a target GPU, whose fused kernels redraw the dropout mask. The
                # CPU's fused kernel has no dropout and would be replaced by several kernels.
                args, kwargs = without_dropout(args, kwargs)
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = call(*args, **kwargs)
            except Exception:  # noqa: BLE001 - it may save all operands if it cannot run alone
                return SavedTensors(
                    True, tuple(index for index, read in enumerate(reads.values()) if read.need)
                )
        values = operands.values()
        places = {storage_of(t): index for index, v in enumerate(values) for t in tensors(v)}
        made = {storage_of(t): index for index, t in enumerate(tensors(result))}
        saved = {storage_of(t): Extra(_numel(t), t.dtype) for t in visited}
        return SavedTensors(
            any(t.requires_grad for t in tensors(result)),
            tuple(sorted({places[key] for key in saved if key in places})),
            tuple(sorted({made[key] for key in saved if key in made and key not in places})),
            tuple(extra for key, extra in saved.items() if key not in {*places, *made}),
        )


def _outline(read: SavedRead) -> Hashable:
    sizes = ((t.dtype, *map(str, t.shape), *map(str, t.stride())) for t in tensors(read.value))
    return read.dtype, read.need, tuple(sizes)


def _stand_in(value: Any, read: SavedRead) -> Any:
    """Return new tensors of the same sizes and strides, without shared storages."""
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_in(item, read) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    dtype = (is_float(value) and read.dtype) or value.dtype
    fresh = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device)
    if not read.need or not is_float(value):
        return fresh
    # In-place writes to a leaf raise; values in a graph are not leaves.
    return fresh.requires_grad_().view_as(fresh)


def _numel(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


@dataclass(frozen=True)
class OperandSite:
    """An operator at its position in the graph.

    Attributes:
        node: its node.
        graph: the graph or body that contains the node.
        reader: its operands and their formats.
        needs: for each operand, whether a gradient flows back to it.
        repeated: whether activation checkpointing recomputes it.
        order: its index among the operators of the top-level graph.
    """

    node: fx.Node
    graph: PrecisionGraph
    reader: OperandReader
    needs: tuple[bool, ...]
    repeated: bool
    order: int

    @property
    def id(self) -> OpId:
        note = node_metadata.NOTE[self.node]
        return note.id

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.reader.operands


class Flow:
    """Data flow of a graph and its bodies.

    Attributes:
        sites: the operators in execution order, including operators in bodies.
        by_node: the sites by node.
        outputs: nodes whose values the graph returns.
        sizes: readable names for symbolic sizes: "batch" for the first dimension of the first input
            with a symbolic one, "sequence" for the second of token ids, else the input's name and
            the dimension.
    """

    def __init__(self, graph: PrecisionGraph) -> None:
        self.graph = graph
        self.sites: list[OperandSite] = []
        self.outputs: list[fx.Node] = []
        self._autograd = Autograd(
            graph.context.fake_mode, graph.context.device, graph.context.options
        )
        self._needs: dict[fx.Node, bool] = {}
        self._same: dict[fx.Node, fx.Node] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._memory: dict[PrecisionGraph, AliasSets] = {graph: AliasSets(graph)}
        self._walk(graph, repeated=False)
        self.by_node = {site.node: site for site in self.sites}
        self.sizes = _named_sizes(graph)

    def source(self, node: fx.Node) -> fx.Node:
        """Return the operator, parameter or input whose result a node passes on unchanged."""
        while node in self._same:
            node = self._same[node]
        return node

    def tensor(self, node: fx.Node) -> fx.Node:
        """Return the node that made the storage of a node's value."""
        node = self.source(node)
        while node in self._roots:
            node = self.source(self._roots[node])
        return node

    def is_view(self, node: fx.Node) -> bool:
        """Return whether a node's value shares the storage of one of its operands."""
        return node in self._roots

    def needs(self, node: fx.Node) -> bool:
        """Return whether a gradient flows back to a node's value."""
        return self._needs.get(node, False)

    def memory(self, graph: PrecisionGraph) -> AliasSets:
        """Return the alias sets of the graph or of one of its bodies."""
        return self._memory[graph]

    def kept(self, site: OperandSite, state: OperandState) -> SavedTensors:
        """Return the tensors that an operator saves in a state that torch computes itself."""
        graph = site.graph
        reads: dict[fx.Node, SavedRead] = {}
        for operand, need in zip(site.operands, site.needs, strict=True):
            value = graph.value(operand.node)
            fmt = site.reader.read_as(state.precision, operand, value)
            before = reads.get(operand.node)
            need = need or (before is not None and before.need)
            dtype = fmt.dtype if fmt is not None else None
            reads[operand.node] = SavedRead(value, dtype, need)
        ordered = {used: reads[used] for used in site.node.all_input_nodes}
        return self._autograd.kept(site.node, ordered)

    def _walk(self, graph: PrecisionGraph, repeated: bool) -> None:
        recording = graph.context.training
        before_inference: dict[Any, bool] = {}
        for node in graph.nodes:
            if switches_grad(node):
                first = node.args[0]
                name = function_name(node)
                if name == "_enter_inference_mode":
                    before_inference[node] = recording
                    recording = not first and graph.context.training
                elif name == "_exit_inference_mode":
                    recording = before_inference[first]
                else:
                    recording = bool(first) and graph.context.training
            elif node.op in ("placeholder", "get_attr"):
                value = graph.value(node)
                self._needs.setdefault(
                    node, isinstance(value, torch.Tensor) and value.requires_grad and recording
                )
            elif node.op == "output":
                if graph.parent is None:
                    fx.node.map_arg(node.args, self.outputs.append)
            elif node.op == "call_function":
                self._visit(graph, node, recording, repeated)

    def _visit(self, graph: PrecisionGraph, node: fx.Node, recording: bool, repeated: bool) -> None:
        for body in node_metadata.bodies(node):
            places = {}
            for placeholder, used in body_operands(node, body):
                if isinstance(used, fx.Node):
                    self._same[placeholder] = used
                    self._needs[placeholder] = self._needs.get(used, False)
                    places[placeholder] = self._memory[graph].of(used)
            self._memory[body] = AliasSets(body, places)
            self._walk(body, repeated=True)
        inner = result_of(node)
        if inner is not None:
            self._same[node] = inner
        elif node.target is py_operator.getitem or node_metadata.has_purpose(
            node, node_metadata.Purpose.AUTOCAST
        ):
            fx.node.map_arg(node.args[0], lambda used: self._same.__setitem__(node, used))
        if node in self._same:
            self._needs[node] = self._needs.get(self._same[node], False) and recording
            return
        note = node_metadata.NOTE.get(node)
        read = operands(node, note)
        needs = tuple(
            recording and self._needs.get(o.node, False) and is_float_all(graph.value(o.node))
            for o in read
        )
        if note is None or node_metadata.bodies(node):
            self._needs[node] = any(needs)
        else:
            reader = OperandReader.of(node, note, graph.value(node))
            site = OperandSite(node, graph, reader, needs, repeated, len(self.sites))
            self.sites.append(site)
            saved = self.kept(site, OperandState(None, None))
            self._needs[node] = saved.differentiable
        self._alias(graph, node)

    def _alias(self, graph: PrecisionGraph, node: fx.Node) -> None:
        mine = {storage_of(t) for t in tensors(graph.value(node))}
        for used in node.all_input_nodes:
            if mine & {storage_of(t) for t in tensors(graph.value(used))}:
                self._roots[node] = used
                return


def _named_sizes(graph: PrecisionGraph) -> dict[sympy.Symbol, sympy.Symbol]:
    result: dict[sympy.Symbol, sympy.Symbol] = {}
    used: set[str] = set()
    for node in graph.nodes:
        value = graph.value(node)
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for index, size in enumerate(value.shape):
            symbol = expression(size)
            if not isinstance(symbol, sympy.Symbol) or symbol in result:
                continue
            name = f"{node.name}_{index}"
            if index == 0 and "batch" not in used:
                name = "batch"
            elif index == 1 and not is_float(value) and "sequence" not in used:
                name = "sequence"
            used.add(name)
            result[symbol] = sympy.Symbol(name, **symbol.assumptions0)
    return result


def is_float_all(value: Any) -> bool:
    """Return whether a value contains a floating-point tensor, which may have a gradient."""
    return any(is_float(t) for t in tensors(value))
