"""What flows through a graph as the model wrote it: where each tensor comes from, which need gradients, what is kept for them.

Read from a graph before casts are inserted. Whatever lies between an operator and its reader is looked through: unpacking, borders of
checkpointed bodies, casts of an autocast region.

Invariant: a tensor that several nodes show, each as a view, is one tensor, named after the node that made it.

Which attention is computed as two products with a softmax between them, in place of torch's fused kernel.

On the CPU that kernel is slow in BF16 where sequences are short: forward and backward together the products, compiled, took 0.25 to 0.64 of
its time for up to 512 tokens, and as long for 1,024 (`benchmarks/kernels/attention.py`). They keep the weights, which the kernel computes
again.

Invariant: who lowers attention and who foresees what it keeps ask the same function. It holds for what was measured alone: training in BF16
on a CPU with a unit for it, compiled by Inductor, without a mask and without dropout, of sizes that are known.

What an operator's backward pass needs: which operands get a gradient, and which tensors are kept for it.

Nothing of this is written down in a table. Autograd is asked: the operator runs on fake operands, with hooks on what it saves. So it holds
for every operator of torch, and for those that are composed of others.

Invariant: nothing is computed and nothing of the graph changes; what was asked once is remembered by operator, types and sizes.
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
"""Place of its chance among the arguments."""
MOST_TOKENS: Final = 512
"""Tokens of query and key up to which products are taken; of different lengths their mean (geometric) counts."""


def as_products(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    need: bool,
    device: torch.device,
    options: Options,
) -> bool:
    """Returns whether a call is attention that is computed as products.

    Args:
        args, kwargs: of the call, tensors of the types that it computes in among them.
        need: whether a gradient flows back to an operand.
    """
    if (
        target is not FUSED
        or not need
        or options.activation_recompute
        or options.inner_backend != "inductor"
    ):
        return False
    query, key, value = args[:3]
    rest = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    if (
        any(rest.get(name) for name in ("dropout_p", "is_causal", "enable_gqa"))
        or rest.get("attn_mask") is not None
    ):
        return False
    if device.type != "cpu" or capability(device) != ANY:
        return False
    # Of 16 bits, a CPU's default is what it has a unit for.
    fast = default_precision(device)
    if fast.bits != 16 or any(
        format_of(t) is not fast or t.dim() != 4 for t in (query, key, value)
    ):
        return False
    lengths = query.shape[-2], key.shape[-2]
    return (
        all(isinstance(length, int) for length in lengths)
        and lengths[0] * lengths[1] <= MOST_TOKENS**2
    )


def without_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of the call of the fused kernel that drops nothing."""
    drops = args[_DROPOUT : _DROPOUT + 1]
    rest = {name: value for name, value in kwargs.items() if name != "dropout_p"}
    return (*args[:_DROPOUT], *(0.0 for _ in drops), *args[_DROPOUT + 1 :]), rest


def products(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Computes attention as what it stands for: scores are rounded to the operands' type, and the softmax is FP32 inside."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1)
    # The same numbers as of a product in 16 bits. Of that Inductor makes the fused kernel again, where the batch is one sequence.
    scaled = (scores.float() * factor).to(scores.dtype)
    return torch.softmax(scaled, -1) @ value


@dataclass(frozen=True)
class Extra:
    """A tensor that only the backward pass knows: a mask, a mean."""

    numel: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class SavedRead:
    """A tensor operand, as an operator reads it.

    Attributes:
        value: fake tensors whose sizes and strides it has.
        dtype: the type it is read in; None where it is read as it lies.
        need: whether it needs a gradient.
    """

    value: Any
    dtype: torch.dtype | None
    need: bool


@dataclass(frozen=True)
class SavedTensors:
    """
    Attributes:
        differentiable: whether the operator's result has a gradient.
        operands: positions, among the operator's tensor operands, of those that are kept.
        results: positions of the results that are kept.
        extras: what else is.
    """

    differentiable: bool = False
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extras: tuple[Extra, ...] = ()


class Autograd:
    """Asks autograd about operators; remembers the answers."""

    def __init__(self, mode: FakeTensorMode | None, device: torch.device, options: Options) -> None:
        self._mode, self._device, self._options = mode, device, options
        self._known: dict[Hashable, SavedTensors] = {}

    def kept(self, node: fx.Node, reads: Mapping[fx.Node, SavedRead]) -> SavedTensors:
        """Returns what a call of an ATen operator keeps that reads the nodes it reads as `reads` says."""
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
                # A GPU's fused kernels draw what they drop again; a CPU's have no dropout, and attention with it is several kernels there.
                args, kwargs = without_dropout(args, kwargs)
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = call(*args, **kwargs)
            except Exception:  # noqa: BLE001 - an operator that does not run alone may keep all that it reads
                return SavedTensors(
                    True, tuple(index for index, read in enumerate(reads.values()) if read.need)
                )
        places = {
            storage_of(t): index
            for index, operand in enumerate(operands.values())
            for t in tensors(operand)
        }
        made = {
            storage_of(t): index
            for index, t in enumerate(tensors(result))
            if storage_of(t) not in places
        }
        extras = {
            storage_of(t): Extra(_numel(t), t.dtype)
            for t in visited
            if storage_of(t) not in {*places, *made}
        }
        return SavedTensors(
            any(t.requires_grad for t in tensors(result)),
            tuple(sorted({places[storage_of(t)] for t in visited if storage_of(t) in places})),
            tuple(sorted({made[storage_of(t)] for t in visited if storage_of(t) in made})),
            tuple(extras.values()),
        )


def _outline(read: SavedRead) -> Hashable:
    sizes = ((t.dtype, *map(str, t.shape), *map(str, t.stride())) for t in tensors(read.value))
    return read.dtype, read.need, tuple(sizes)


def _stand_in(value: Any, read: SavedRead) -> Any:
    """Returns fresh tensors of the same sizes, no two of one memory."""
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_in(item, read) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    dtype = read.dtype if read.dtype is not None and is_float(value) else value.dtype
    fresh = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device)
    # A leaf may not be written to in place; what a graph computes is none.
    return fresh.requires_grad_().view_as(fresh) if read.need and is_float(value) else fresh


def _numel(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


@dataclass(frozen=True)
class OperandSite:
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

    def memory(self, graph: PrecisionGraph) -> AliasSets:
        """Returns which values of the graph, or of one of its bodies, share memory."""
        return self._memory[graph]

    def kept(self, site: OperandSite, state: OperandState) -> SavedTensors:
        """Returns what an operator keeps for its backward pass in a state that torch computes itself."""
        graph = site.graph
        reads: dict[fx.Node, SavedRead] = {}
        for operand, need in zip(site.operands, site.needs, strict=True):
            value = graph.value(operand.node)
            fmt = site.reader.read_as(state.precision, operand, value)
            before = reads.get(operand.node)
            dtype = fmt.dtype if fmt is not None else None
            reads[operand.node] = SavedRead(
                value, dtype, need or (before is not None and before.need)
            )
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
            for placeholder, inputs in body_operands(node, body):
                if isinstance(inputs, fx.Node):
                    self._same[placeholder] = inputs
                    self._needs[placeholder] = self._needs.get(inputs, False)
            around = self._memory[graph]
            inputs = {
                p: around.of(used)
                for p, used in body_operands(node, body)
                if isinstance(used, fx.Node)
            }
            self._memory[body] = AliasSets(body, inputs)
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
            site = OperandSite(
                node,
                graph,
                OperandReader.of(node, note, graph.value(node)),
                needs,
                repeated,
                len(self.sites),
            )
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
            usual = (
                "batch" if index == 0 else "sequence" if index == 1 and not is_float(value) else ""
            )
            name = usual if usual and usual not in used else f"{node.name}_{index}"
            used.add(name)
            result[symbol] = sympy.Symbol(name, **symbol.assumptions0)
    return result


def is_float_all(value: Any) -> bool:
    """Whether a gradient may flow back to a value: a floating-point tensor, or several."""
    return any(is_float(t) for t in tensors(value))
