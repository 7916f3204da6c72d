"""The option "keep_less": what the forward pass keeps for the backward pass is as little as can be without another product.

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

from typing import Any, Final

import torch
import torch._functorch.config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

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
        repeated = {ours.quantize.default, ours.carry.default, ours.keep.default, ours.unpack_bits.default}
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
