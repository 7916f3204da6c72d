"""The option "keep_less": the bytes that a ReLU keeps for its backward pass wait for it in a bit each.

Which bytes are kept a partitioner of joint graphs says, once it is done: where a ReLU's result is there anyway, it is none. So what is kept
is packed behind the partitioner, in both graphs that it has made; packed in front of it, it would be packed where nothing is kept, too.

Invariant: a graph's results are those that it had, to the bit; of what passes from the forward to the backward graph the number and the
order stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch._inductor.config
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from qsync_fx.backend.inductor import relu
from qsync_fx.backend.operators.bits import BYTE

aten, qsync = torch.ops.aten, torch.ops.qsync
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
        given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        kept = outputs[kwargs["num_fwd_outputs"] :]
        packed = {node: _packed(forward.graph, node) for node in kept if _closes(node, given)}
        if packed:
            forward.graph.output_node().args = (type(outputs)(packed.get(node, node) for node in outputs),)
            for node, bits in packed.items():
                _unpacked(backward.graph, given[node.name], bits)
            for graph in forward, backward:
                graph.graph.lint()
                graph.recompile()
        return forward, backward

    def uuid(self) -> Any:
        own = get_hash_for_files((__file__,))
        return own if self.partition is None else (own, self.partition.uuid())


def _closes(node: Any, given: dict[str, fx.Node]) -> bool:
    """Whether what a forward graph keeps are the bytes of a ReLU, which gates alone read."""
    if not isinstance(node, fx.Node) or node.name not in given or len(relu.closing(node)) != 3:
        return False
    value, readers = node.meta["val"], given[node.name].users
    gates = bool(readers) and all(reader.target is qsync.gate.default for reader in readers)
    return gates and value.device.type == "cpu" and all(type(size) is int for size in value.shape)


def _packed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Puts the bits of bytes behind them. Inductor has a network's images channels last, if it lays them out: so they are read."""
    if turned := _turned(node.meta["val"]):
        with graph.inserting_after(node):
            node = _called(graph, aten.permute.default, node, turned[0])
    with graph.inserting_after(node):
        return _called(graph, qsync.pack_bits.default, node)


def _unpacked(graph: fx.Graph, taken: fx.Node, bits: fx.Node) -> None:
    """Has a backward graph take bits for bytes."""
    value, readers = taken.meta["val"], list(taken.users)
    turned = _turned(value)
    taken.meta["val"] = bits.meta["val"]
    taken.meta.pop("tensor_meta", None)
    size = (value.permute(turned[0]) if turned else value).shape
    with graph.inserting_before(readers[0]):
        found = _called(graph, qsync.unpack_bits.default, taken, tuple(size), BYTE)
        if turned:
            found = _called(graph, aten.permute.default, found, turned[1])
    for reader in readers:
        reader.replace_input_with(taken, found)


def _turned(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return _LAST.get(value.dim()) if torch._inductor.config.layout_optimization else None


def _called(graph: fx.Graph, target: Any, of: fx.Node, *others: Any) -> fx.Node:
    node = graph.call_function(target, (of, *others))
    node.meta["val"] = target(of.meta["val"], *others)
    return node
