"""The option "activation_recompute": the bytes that a ReLU keeps for its backward pass wait for it in a bit each.

Which bytes are kept a partitioner of joint graphs says, once it is done: where a ReLU's result is there anyway, it is none. So what is kept
is packed behind the partitioner, in both graphs that it has made; packed in front of it, it would be packed where nothing is kept, too.

Invariant: a graph's results are those that it had, to the bit; of what passes from the forward to the backward graph the number and the
order stay.

What ReLU keeps for its backward pass on the CPU: a byte an element, in the layout of the tensor that it says something about.

Where the result itself is not kept, as in front of a quantized layer, Inductor keeps a bool, and its C++ writes and reads bools one at a
time: in a residual block of ResNet that took longer than the normalization that it is fused with. Bytes are converted in vectors.

Invariant: gradients are those of `aten::threshold_backward`, to the bit.

The option "activation_recompute": what the forward pass keeps for the backward pass is as little as can be without another product.

A partitioner of torch's chooses what is kept, by the least bytes. By itself it lets nothing be computed again that a product of the
backward pass reads, nor what lies far apart from its other readers: it counts that as dear. So both a GELU's input and its output are
kept, a norm's too, what dropout has left of softmax beside softmax, and a copy of each weight in BF16. Here it may choose freely among
elementwise operators, norms, conversions and roundings: one pass over memory each, in kernels that the backward pass has anyway. And
what dropout keeps is kept in a bit a value, or, where it is drawn by `qsync::keep`, not at all.

Invariant: products, reductions and what torch draws are computed once. What is computed again comes from the same values by the same
formula, and a rounding or a dropout of ours from the same seed, so that gradients are those without the option, but for roundings to 16
bits that a compiler leaves out within a fused kernel.
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
"""What becomes of a comparison: bytes, and of these with channels last their bits (`qsync_fx.backend.inductor.recompute_policy`)."""


def threshold_backward(gradient: Tensor, result: Tensor, threshold: float) -> Tensor:
    """The decomposition; made of what a partitioner may compute again where the result is kept anyway.

    Of the tensors on the way it keeps the smallest, and of equal ones that which is nearest to the backward pass: the byte.
    """
    return gate(gradient, (result <= threshold).to(torch.float32).to(BYTE))


def lower_gate(gradient: Any, closed: Any) -> Any:
    """Inductor's lowering of `qsync::gate`: elementwise, and in FP32, whose masks it has vectors for."""
    from torch._inductor.lowering import lowerings, to_dtype

    is_closed = lowerings[aten.gt.Scalar](to_dtype(closed, torch.float32), 0.0)
    return lowerings[aten.where.self](is_closed, 0.0, gradient)


def closing(node: fx.Node) -> list[Any]:
    """Returns the nodes that a ReLU's bytes, or their bits, are made by, from the comparison to `node`; none where it is neither."""
    chain: list[Any] = [node]
    while chain[0].target in _MADE_OF:
        chain.insert(0, chain[0].args[0])
    compared = chain[0].target is aten.le.Scalar and len(chain) >= 3
    converted = compared and all(
        item.target is prims.convert_element_type.default for item in chain[1:3]
    )
    return chain if converted and chain[2].args[1] is BYTE else []


class EarlyBytes(CustomGraphPass):
    """Puts the bytes that a forward graph returns, to be kept, right behind the results that they come from; and their bits.

    A partitioner puts them at the end of the graph, and Inductor looks for tensors with channels last up to the last convolution only:
    bytes behind it would be transposed when they are written and when they are read.
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
"""Of what has spatial dimensions: the order that puts channels last, and the one that turns it back."""


class InBits(CustomPartitionerFn):
    """Partitions a joint graph as another does, torch's own by default, and packs what ReLUs keep."""

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
    """Whether what a forward graph keeps are the bytes of a ReLU, which gates alone read."""
    if not isinstance(node, fx.Node) or node.name not in argument or len(closing(node)) != 3:
        return False
    value, readers = node.meta["val"], argument[node.name].users
    gates = bool(readers) and all(reader.target is qsync.gate.default for reader in readers)
    return gates and value.device.type == "cpu" and all(type(size) is int for size in value.shape)


def _packed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Puts the bits of bytes behind them. Inductor has a network's images channels last, if it lays them out: so they are read."""
    if transposed := _turned(node.meta["val"]):
        with graph.inserting_after(node):
            node = _called(graph, aten.permute.default, node, transposed[0])
    with graph.inserting_after(node):
        return _called(graph, qsync.pack_bits.default, node)


def _unpacked(graph: fx.Graph, used: fx.Node, bits: fx.Node) -> None:
    """Has a backward graph take bits for bytes."""
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
"""Of `torch._functorch.config`: what else a partitioner may have computed again."""


def settings() -> Any:
    """Returns a context in which partitioners choose freely."""
    return torch._functorch.config.patch(SETTINGS)


class Repeatable(CustomGraphPass):
    """Lets a joint graph's partitioner repeat our own operators that are functions of what they read and take one pass over memory.

    It repeats what is on a list of torch's, which no operator of others is on. So the list is switched off, and what it would have kept
    is marked as such. What is rounded of the graph's inputs, which weights are, is kept: it takes longer than a conversion and a quarter of
    their bytes, and does not grow with the batch.
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
            # The seed, which is drawn, has none.
            if of_inputs.issuperset(node.all_input_nodes):
                of_inputs.add(node)
            if node.op != "call_function":
                continue
            weight = node in of_inputs and node.target is ours.quantize.default
            if weight or not (listed(node) or node.target in repeated):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
