"""Saved tensors of a compiled step: masks in bits, and recomputation ("activation_recompute").

With the option, torch's min-cut partitioner may recompute all pointwise operators, norms, casts and
roundings, and masks of ReLU and dropout take one bit per value. Invariant: products, reductions and
torch's random numbers are computed once. Gradients are the same except for 16-bit roundings that a
compiler omits within a fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import SymInt, Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from qsync_fx import _C, torch_internals as internals
from qsync_fx.backend.operators.registration import define, require
from qsync_fx.rounding import DROPOUT, SHARED, RandomStreams

aten = torch.ops.aten
prims = torch.ops.prims
qsync = torch.ops.qsync

_BYTE: Final = torch.int8
"""Dtype of ReLU masks: Inductor's C++ reads bools one at a time."""
_IN_BYTES: Final = (torch.bool, _BYTE)


def _packed_fake(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


@define("pack_bits(Tensor mask) -> Tensor", "CPU", _packed_fake)
def pack_bits(mask: Tensor) -> Tensor:
    """Return `mask`, bool or int8 zeros and ones, any shape, as uint8, `[(numel + 7) // 8]`.

    Values are in row-major order; the first is the lowest bit of the first byte.
    """
    assert mask.dtype in _IN_BYTES
    rows, bits = mask.contiguous(), _packed_fake(mask)
    _C.pack_bits(rows.data_ptr(), bits.data_ptr(), rows.numel(), torch.get_num_threads())
    return bits


def _unpacked_fake(
    bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype | None = None
) -> Tensor:
    dtype = dtype or torch.bool
    require(dtype in _IN_BYTES, lambda: f"qsync::unpack_bits: masks are bool or int8, not {dtype}")
    return bits.new_empty(size, dtype=dtype)


_UNPACK = "unpack_bits(Tensor bits, SymInt[] size, ScalarType? dtype=None) -> Tensor"


@define(_UNPACK, "CPU", _unpacked_fake)
def unpack_bits(
    bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the mask of shape `size`, contiguous, that `pack_bits` packed; bool by default."""
    mask, rows = _unpacked_fake(bits, size, dtype), bits.contiguous()
    assert rows.numel() == (mask.numel() + 7) // 8
    _C.unpack_bits(rows.data_ptr(), mask.data_ptr(), mask.numel(), torch.get_num_threads())
    return mask


def _keep_fake(size: Sequence[int | SymInt], seed: Tensor, stream: int, p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.uint8)


@define("keep(SymInt[] size, Tensor seed, int stream, float p) -> Tensor", "CPU", _keep_fake)
def keep(size: Sequence[int | SymInt], seed: Tensor, stream: int, p: float) -> Tensor:
    """Return uint8 values of shape `size`, each 0 with probability `p` (up to 2**-24), else 1.

    The random number of a value depends on its index, not on threads.
    """
    result = _keep_fake(size, seed, stream, p)
    random = int(seed.item()) & (2**64 - 1), stream & (2**32 - 1)
    _C.keep(result.data_ptr(), result.numel(), p, *random, torch.get_num_threads())
    return result


def fast_dropout(bits: bool) -> Callable[..., Any]:
    """Return `aten.native_dropout` for one graph, by the option "fast_dropout".

    Each dropout has its own stream of the graph's seed. The masks are saved, in bits if `bits`.
    """
    streams = RandomStreams(DROPOUT, SHARED)

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        supported = x.dtype.is_floating_point and x.device.type == "cpu"
        if not (train and 0.0 < p < 1.0 and supported):
            return NotImplemented
        mask = keep(x.shape, qsync.draw.default(x.device), streams.take(), p)
        if bits:
            mask = unpack_bits(pack_bits(mask.view(torch.bool)), mask.shape)
        return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask

    return native_dropout


def dropout_in_bits(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `aten.native_dropout` with a mask that both passes read from packed bits."""

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        if not train or not 0.0 < p < 1.0 or x.device.type != "cpu":
            return torchs(x, p, train)
        _, drawn = torchs(x, p, train)
        mask = unpack_bits(pack_bits(drawn), drawn.shape)
        return mask * x * (1.0 / (1.0 - p)), mask

    return native_dropout


@define("gate(Tensor gradient, Tensor closed) -> Tensor")
def gate(gradient: Tensor, closed: Tensor) -> Tensor:
    """Return 0 where `closed`, int8, is not 0, also for NaN gradients, else the gradient."""
    return torch.where(closed != 0, 0.0, gradient)


def lower_gate(gradient: Any, closed: Any) -> Any:
    """Lower `qsync::gate` to pointwise FP32, for which Inductor has vector masks."""
    is_closed = internals.inductor_lowerings[aten.gt.Scalar](
        internals.to_dtype(closed, torch.float32), 0.0
    )
    return internals.inductor_lowerings[aten.where.self](is_closed, 0.0, gradient)


def threshold_backward(gradient: Tensor, result: Tensor, threshold: float) -> Tensor:
    """Decompose `aten::threshold_backward` into values that are recomputable from a saved result.

    The partitioner saves the smallest tensor of the chain: the byte mask. Same bits as ATen's.
    """
    return gate(gradient, (result <= threshold).to(torch.float32).to(_BYTE))


_CAST: Final = prims.convert_element_type.default
_MADE_OF: Final = (_CAST, aten.permute.default, qsync.pack_bits.default)
"""Operators between a comparison and its saved mask: casts to bytes, permute, packing."""


def _relu_mask(node: fx.Node) -> list[Any]:
    """Return the nodes from the comparison to a ReLU mask `node`, in bytes or bits; else []."""
    chain: list[Any] = [node]
    while chain[0].target in _MADE_OF:
        chain.insert(0, chain[0].args[0])
    targets = [item.target for item in chain[:3]]
    if targets == [aten.le.Scalar, _CAST, _CAST] and chain[2].args[1] is _BYTE:
        return chain
    return []


class _Pass(internals.CustomGraphPass):
    """A graph pass that torch's caches identify by this file."""

    def uuid(self) -> Any:
        return internals.get_hash_for_files((__file__,))


class EarlyBytes(_Pass):
    """Forward-graph pass that moves saved ReLU masks, in bytes or bits, right after their inputs.

    Inductor assigns channels-last only up to the last convolution: later masks are transposed.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for saved in graph.output_node().all_input_nodes:
            chain = _relu_mask(saved)
            if chain and chain[0].args[0].op != "placeholder":
                for place, moved in zip((chain[0].args[0], *chain), chain, strict=False):
                    place.append(moved)


_LAST: Final = {4: ((0, 2, 3, 1), (0, 3, 1, 2)), 5: ((0, 2, 3, 4, 1), (0, 4, 1, 2, 3))}
"""Permutations to channels-last and back, by rank."""


class InBits(internals.CustomPartitionerFn):
    """Partitioner that runs another, torch's by default, and packs saved ReLU masks into bits."""

    def __init__(self, partition: Any = None) -> None:
        self.partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.partition or internals.min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        outputs: Any = forward.graph.output_node().args[0]
        inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        saved = outputs[kwargs["num_fwd_outputs"] :]
        packed = {node: _pack(forward.graph, node) for node in saved if _only_gates(node, inputs)}
        if packed:
            forward.graph.output_node().args = (
                type(outputs)(packed.get(node, node) for node in outputs),
            )
            for node, bits in packed.items():
                _unpack(backward.graph, inputs[node.name], bits)
            for graph in forward, backward:
                graph.graph.lint()
                graph.recompile()
        return forward, backward

    def uuid(self) -> Any:
        return internals.get_hash_for_files((__file__,)), self.partition and self.partition.uuid()


def _only_gates(node: Any, inputs: dict[str, fx.Node]) -> bool:
    """Return whether a saved node is a ReLU byte mask that only gates read."""
    if not isinstance(node, fx.Node) or node.name not in inputs or len(_relu_mask(node)) != 3:
        return False
    value, readers = node.meta["val"], inputs[node.name].users
    gates = bool(readers) and all(reader.target is qsync.gate.default for reader in readers)
    return gates and value.device.type == "cpu" and all(type(size) is int for size in value.shape)


def _pack(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Insert the packed bits of a mask after it, in the order of its channels-last memory."""
    if orders := _channels_last(node.meta["val"]):
        with graph.inserting_after(node):
            node = _call(graph, aten.permute.default, node, orders[0])
    with graph.inserting_after(node):
        return _call(graph, qsync.pack_bits.default, node)


def _unpack(graph: fx.Graph, used: fx.Node, bits: fx.Node) -> None:
    """Make a backward graph read bits instead of bytes."""
    value, readers = used.meta["val"], list(used.users)
    used.meta["val"] = bits.meta["val"]
    used.meta.pop("tensor_meta", None)
    with graph.inserting_before(readers[0]):
        if orders := _channels_last(value):
            size = tuple(value.permute(orders[0]).shape)
            result = _call(graph, qsync.unpack_bits.default, used, size, _BYTE)
            result = _call(graph, aten.permute.default, result, orders[1])
        else:
            result = _call(graph, qsync.unpack_bits.default, used, tuple(value.shape), _BYTE)
    for reader in readers:
        reader.replace_input_with(used, result)


def _channels_last(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return _LAST.get(value.dim()) if internals.inductor_config.layout_optimization else None


def _call(graph: fx.Graph, target: Any, of: fx.Node, *others: Any) -> fx.Node:
    node = graph.call_function(target, (of, *others))
    node.meta["val"] = target(of.meta["val"], *others)
    return node


def settings() -> Any:
    """Return a context manager that lets the partitioner recompute freely."""
    return internals.functorch_config.patch(
        ban_recompute_materialized_backward=False,
        ban_recompute_used_far_apart=False,
        ban_recompute_not_in_allowlist=False,
    )


class Repeatable(_Pass):
    """Joint-graph pass that makes our pure, single-pass operators recomputable.

    The partitioner's allowlist contains no custom operators, so it is disabled, and all other
    unlisted operators are marked MUST_SAVE. Quantized weights are saved: rounding is slower than a
    cast, and they do not grow with the batch.
    """

    def __call__(self, graph: fx.Graph) -> None:
        quantize = qsync.quantize.default
        repeated = {quantize, qsync.carry.default, keep, unpack_bits}
        listed = internals.get_default_op_list().is_recomputable
        of_inputs: set[fx.Node] = set()
        for node in graph.nodes:
            # The drawn seed has no inputs and counts as one.
            if of_inputs.issuperset(node.all_input_nodes):
                of_inputs.add(node)
            if node.op != "call_function":
                continue
            weight = node in of_inputs and node.target is quantize
            if weight or not (listed(node) or node.target in repeated):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
