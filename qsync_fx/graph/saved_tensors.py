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

from qsync_fx.devices.format_support import ANY, capability, default_precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import AliasSets, operands as body_operands, result_of
from qsync_fx.graph.fx_utils import (
    expression,
    fake_run,
    filled,
    format_of,
    function_name,
    is_float,
    nodes_in,
    storage_of,
    switches_grad,
    tensors,
)
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.operand_formats import Operand, OperandReader, OperandState, operands
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import OpId
from qsync_fx.torch_internals import FakeTensorMode, OpOverload

FUSED: Final = torch.ops.aten.scaled_dot_product_attention.default
MOST_TOKENS: Final = 512
"""Maximum number of tokens for attention as products; the geometric mean if lengths differ.

Up to it the compiled products are faster than the fused kernel, which recomputes the weights
(`benchmarks/kernels/attention.py`).
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

    It accepts only the measured case: training in BF16 on a CPU with native support for it,
    compiled by Inductor, without mask and dropout, of static sizes.

    The arguments have tensors in the compute dtype; `need`: a gradient flows back to an operand.
    """
    if target is not FUSED or not need or options.activation_recompute:
        return False
    if options.inner_backend != "inductor" or device.type != "cpu" or capability(device) != ANY:
        return False
    call = filled(FUSED, args, kwargs)
    if call["attn_mask"] is not None:
        return False
    if call["dropout_p"] or call["is_causal"] or call["enable_gqa"]:
        return False
    # A CPU's default format has 16 bits only if the CPU supports it natively.
    fast = default_precision(device)
    if fast.bits != 16 or any(format_of(t) is not fast or t.dim() != 4 for t in args[:3]):
        return False
    queries, keys = args[0].shape[-2], args[1].shape[-2]
    if not isinstance(queries, int) or not isinstance(keys, int):
        return False
    return queries * keys <= MOST_TOKENS**2


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
    """A tensor operand, the dtype of its read (None for its own), and whether it has a gradient."""

    value: Any
    dtype: torch.dtype | None
    need: bool


@dataclass(frozen=True)
class SavedTensors:
    """Tensors that an operator saves for backward, as indices of tensor operands and results."""

    differentiable: bool = False
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extras: tuple[Extra, ...] = ()


class Autograd:
    """Saved tensors of operators according to autograd, cached by operator, dtypes and sizes."""

    def __init__(self, mode: FakeTensorMode | None, device: torch.device, options: Options) -> None:
        self._mode, self._device, self._options = mode, device, options
        self._cache: dict[Hashable, SavedTensors] = {}

    def saved_for(self, node: fx.Node, reads: Mapping[fx.Node, SavedRead]) -> SavedTensors:
        """Return the tensors that a call of an ATen operator saves for the given reads."""
        needed = any(read.need for read in reads.values())
        if not needed or not isinstance(node.target, OpOverload):
            return SavedTensors()
        places = {used: index for index, used in enumerate(reads)}
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda used: f"%{places[used]}")
        outlines = [
            (t.dtype, *map(str, t.shape), *map(str, t.stride()), read.dtype, read.need)
            for read in reads.values()
            for t in tensors(read.value)
        ]
        key = node.target, str(arguments), tuple(outlines)
        if key not in self._cache:
            self._cache[key] = self._ask(node, reads)
        return self._cache[key]

    def _ask(self, node: fx.Node, reads: Mapping[fx.Node, SavedRead]) -> SavedTensors:
        visited: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            visited.append(tensor)
            return tensor

        no_autocast = torch.autocast(self._device.type, enabled=False)
        with fake_run(self._mode, torch.enable_grad(), no_autocast):
            operands = {used: _stand_in(read.value, read) for used, read in reads.items()}
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
            call: Any = node.target
            if as_products(node.target, args, kwargs, True, self._device, self._options):
                call, args, kwargs = products, (*args[:3], kwargs.get("scale")), {}
            elif node.target is FUSED and self._simulates_gpu():
                # The fused kernels of the GPU redraw the dropout mask. The CPU's fused kernel has
                # no dropout and would be replaced by several kernels.
                args, kwargs = (), filled(FUSED, args, kwargs) | {"dropout_p": 0.0}
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = call(*args, **kwargs)
            except Exception:  # noqa: BLE001 - it may save all operands if it cannot run alone
                needed = (index for index, read in enumerate(reads.values()) if read.need)
                return SavedTensors(True, tuple(needed))
        places = {
            storage_of(t): index
            for index, value in enumerate(operands.values())
            for t in tensors(value)
        }
        made = {storage_of(t): index for index, t in enumerate(tensors(result))}
        saved = {storage_of(t): t for t in visited}
        extras = [t for key, t in saved.items() if key not in {*places, *made}]
        return SavedTensors(
            any(t.requires_grad for t in tensors(result)),
            tuple(sorted({places[key] for key in saved if key in places})),
            tuple(sorted({made[key] for key in saved if key in made and key not in places})),
            # A view saves its storage.
            tuple(Extra(t.untyped_storage().nbytes() // t.itemsize, t.dtype) for t in extras),
        )

    def _simulates_gpu(self) -> bool:
        return self._device.type == "cpu" and capability(self._device) != ANY


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


@dataclass(frozen=True)
class OperandSite:
    """An operator at its position, with its index among the operators of the top-level graph.

    `needs`: a gradient flows back to an operand. `repeated`: checkpointing recomputes it.
    """

    node: fx.Node
    graph: PrecisionGraph
    reader: OperandReader
    needs: tuple[bool, ...]
    repeated: bool
    order: int

    @property
    def id(self) -> OpId:
        return node_metadata.NOTE[self.node].id

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.reader.operands


class Flow:
    """Data flow of a graph and its bodies.

    Attributes:
        sites: the operators in execution order, including operators in bodies.
        sizes: readable names for symbolic sizes: "batch" for the first dimension of the first input
            with a symbolic one, "sequence" for the second of token ids, else the input's name and
            the dimension.
    """

    def __init__(self, graph: PrecisionGraph) -> None:
        self.graph = graph
        self.sites: list[OperandSite] = []
        self.outputs: list[fx.Node] = []
        context = graph.context
        self._autograd = Autograd(context.fake_mode, context.device, context.options)
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

    def saved_for(self, site: OperandSite, state: OperandState) -> SavedTensors:
        """Return the tensors that an operator saves in a state that torch computes itself."""
        graph = site.graph
        reads: dict[fx.Node, SavedRead] = {}
        for operand, need in zip(site.operands, site.needs, strict=True):
            value = graph.value(operand.node)
            fmt = site.reader.read_as(state.precision, operand, value)
            need = need or (operand.node in reads and reads[operand.node].need)
            reads[operand.node] = SavedRead(value, getattr(fmt, "dtype", None), need)
        ordered = {used: reads[used] for used in site.node.all_input_nodes}
        return self._autograd.saved_for(site.node, ordered)

    def _walk(self, graph: PrecisionGraph, repeated: bool) -> None:
        recording = training = graph.context.training
        before_inference: dict[Any, bool] = {}
        for node in graph.nodes:
            if switches_grad(node):
                match function_name(node):
                    case "_enter_inference_mode":
                        before_inference[node] = recording
                        recording = training and not node.args[0]
                    case "_exit_inference_mode":
                        recording = before_inference[node.args[0]]
                    case _:
                        recording = training and bool(node.args[0])
            elif node.op in ("placeholder", "get_attr"):
                requires_grad = getattr(graph.value(node), "requires_grad", False)
                self._needs.setdefault(node, requires_grad and recording)
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
                    self._needs[placeholder] = self.needs(used)
                    places[placeholder] = self._memory[graph].of(used)
            self._memory[body] = AliasSets(body, places)
            self._walk(body, repeated=True)
        same = result_of(node)
        autocast = node_metadata.has_purpose(node, node_metadata.Purpose.AUTOCAST)
        if same is None and (autocast or node.target is py_operator.getitem):
            same = next(iter(nodes_in(node.args[0])), None)
        if same is not None:
            self._same[node] = same
            self._needs[node] = self.needs(same) and recording
            return
        note = node_metadata.NOTE.get(node)
        read = operands(node, note)
        needs = tuple(
            # Only floating-point tensors may have a gradient.
            recording and self.needs(o.node) and any(map(is_float, tensors(graph.value(o.node))))
            for o in read
        )
        if note is None or node_metadata.bodies(node):
            self._needs[node] = any(needs)
        else:
            reader = OperandReader.of(node, note, graph.value(node))
            site = OperandSite(node, graph, reader, needs, repeated, len(self.sites))
            self.sites.append(site)
            self._needs[node] = self.saved_for(site, OperandState(None, None)).differentiable
        storages = {storage_of(t) for t in tensors(graph.value(node))}
        for used in reversed(node.all_input_nodes):
            if storages & {storage_of(t) for t in tensors(graph.value(used))}:
                self._roots[node] = used


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
