"""Saved tensors and recomputation: the option "activation_recompute", and ReLU masks in bytes.

By default torch's min-cut partitioner saves both input and output of a GELU or a norm, softmax and
its dropout result, and a BF16 copy of each weight: it does not recompute operands of backward
products, nor values with distant readers. With the option it may recompute all pointwise
operators, norms, casts and roundings, one pass over memory each. Torch's dropout masks are saved in
bits; masks of `qsync::keep` are recomputed.

ReLU masks are int8 instead of bool, which Inductor's C++ reads one at a time. `InBits` packs them
into bits after partitioning, when it is known which are saved.

Invariant: products, reductions and torch's random numbers are computed once. Recomputed values and
roundings use the same inputs and seed, so gradients are the same except for 16-bit roundings that a
compiler omits within a fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)
from torch.utils.checkpoint import CheckpointPolicy

from qsync_fx.backend.operators.masks import BYTE, gate

aten = torch.ops.aten
prims = torch.ops.prims
_MADE_OF: Final = (
    prims.convert_element_type.default,
    aten.permute.default,
    torch.ops.qsync.pack_bits.default,
)
"""Operators between a comparison and its saved mask: casts to bytes, permute, packing."""


def threshold_backward(gradient: Tensor, result: Tensor, threshold: float) -> Tensor:
    """Decompose `aten::threshold_backward` into values that are recomputable from a saved result.

    The partitioner saves the smallest tensor of the chain, and of equal ones the nearest to the
    backward pass: the byte mask. Gradients have the bits of the ATen operator.
    """
    return gate(gradient, (result <= threshold).to(torch.float32).to(BYTE))


def lower_gate(gradient: Any, closed: Any) -> Any:
    """Lower `qsync::gate` to pointwise FP32, for which Inductor has vector masks."""
    from torch._inductor.lowering import lowerings, to_dtype

    is_closed = lowerings[aten.gt.Scalar](to_dtype(closed, torch.float32), 0.0)
    return lowerings[aten.where.self](is_closed, 0.0, gradient)


def closing(node: fx.Node) -> list[Any]:
    """Return the nodes from the comparison to a ReLU mask `node`, in bytes or bits; else []."""
    chain: list[Any] = [node]
    while chain[0].target in _MADE_OF:
        chain.insert(0, chain[0].args[0])
    compared = chain[0].target is aten.le.Scalar and len(chain) >= 3
    converted = compared and all(
        item.target is prims.convert_element_type.default for item in chain[1:3]
    )
    return chain if converted and chain[2].args[1] is BYTE else []


class EarlyBytes(CustomGraphPass):
    """Forward-graph pass that moves saved ReLU masks, in bytes or bits, right after their inputs.

    The partitioner puts them at the end of the graph, but Inductor assigns channels-last only up to
    the last convolution: later masks would be transposed on write and on read.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for saved in graph.output_node().all_input_nodes:
            chain = closing(saved)
            if chain and chain[0].args[0].op != "placeholder":
                for place, moved in zip((chain[0].args[0], *chain), chain, strict=False):
                    place.append(moved)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


qsync = torch.ops.qsync
_LAST: Final = {4: ((0, 2, 3, 1), (0, 3, 1, 2)), 5: ((0, 2, 3, 4, 1), (0, 4, 1, 2, 3))}
"""Permutations to channels-last and back, by rank."""


class InBits(CustomPartitionerFn):
    """Partitioner that runs another, torch's by default, and packs saved ReLU masks into bits.

    Results stay bit-identical; number and order of the saved tensors do not change.
    """

    def __init__(self, partition: Any = None) -> None:
        self.partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.partition or min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        outputs: Any = forward.graph.output_node().args[0]
        inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        saved = outputs[kwargs["num_fwd_outputs"] :]
        packed = {node: _packed(forward.graph, node) for node in saved if _closes(node, inputs)}
        if packed:
            forward.graph.output_node().args = (
                type(outputs)(packed.get(node, node) for node in outputs),
            )
            for node, bits in packed.items():
                _unpacked(backward.graph, inputs[node.name], bits)
            for graph in forward, backward:
                graph.graph.lint()
                graph.recompile()
        return forward, backward

    def uuid(self) -> Any:
        owned = get_hash_for_files((__file__,))
        return owned if self.partition is None else (owned, self.partition.uuid())


def _closes(node: Any, argument: dict[str, fx.Node]) -> bool:
    """Return whether a saved node is a ReLU byte mask that only gates read."""
    if not isinstance(node, fx.Node) or node.name not in argument or len(closing(node)) != 3:
        return False
    value, readers = node.meta["val"], argument[node.name].users
    gates = bool(readers) and all(reader.target is qsync.gate.default for reader in readers)
    return gates and value.device.type == "cpu" and all(type(size) is int for size in value.shape)


def _packed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Insert the packed bits of a mask after it, in the order of its channels-last memory."""
    if transposed := _turned(node.meta["val"]):
        with graph.inserting_after(node):
            node = _called(graph, aten.permute.default, node, transposed[0])
    with graph.inserting_after(node):
        return _called(graph, qsync.pack_bits.default, node)


def _unpacked(graph: fx.Graph, used: fx.Node, bits: fx.Node) -> None:
    """Make a backward graph read bits instead of bytes."""
    value, readers = used.meta["val"], list(used.users)
    transposed = _turned(value)
    used.meta["val"] = bits.meta["val"]
    used.meta.pop("tensor_meta", None)
    size = (value.permute(transposed[0]) if transposed else value).shape
    with graph.inserting_before(readers[0]):
        result = _called(graph, qsync.unpack_bits.default, used, tuple(size), BYTE)
        if transposed:
            result = _called(graph, aten.permute.default, result, transposed[1])
    for reader in readers:
        reader.replace_input_with(used, result)


def _turned(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return _LAST.get(value.dim()) if torch._inductor.config.layout_optimization else None


def _called(graph: fx.Graph, target: Any, of: fx.Node, *others: Any) -> fx.Node:
    node = graph.call_function(target, (of, *others))
    node.meta["val"] = target(of.meta["val"], *others)
    return node


SETTINGS: Final = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_not_in_allowlist": False,
}
"""`torch._functorch.config` settings that let the partitioner recompute freely."""


def settings() -> Any:
    """Return a context manager that applies `SETTINGS`."""
    return torch._functorch.config.patch(SETTINGS)


class Repeatable(CustomGraphPass):
    """Joint-graph pass that makes our pure, single-pass operators recomputable.

    The partitioner's allowlist contains no custom operators, so it is disabled, and all other
    unlisted operators are marked MUST_SAVE. Quantized graph inputs, which weights are, are saved:
    rounding is slower than a cast, and they are a quarter of the bytes and do not grow with the
    batch.
    """

    def __call__(self, graph: fx.Graph) -> None:
        from torch._functorch.partitioners import get_default_op_list

        ours = torch.ops.qsync
        repeated = {
            ours.quantize.default,
            ours.carry.default,
            ours.keep.default,
            ours.unpack_bits.default,
        }
        listed = get_default_op_list().is_recomputable
        of_inputs: set[fx.Node] = set()
        for node in graph.nodes:
            # The drawn seed has no inputs and counts as one.
            if of_inputs.issuperset(node.all_input_nodes):
                of_inputs.add(node)
            if node.op != "call_function":
                continue
            weight = node in of_inputs and node.target is ours.quantize.default
            if weight or not (listed(node) or node.target in repeated):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
