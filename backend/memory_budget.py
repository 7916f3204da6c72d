"""Partitioner of the option "memory_budget": recomputation of activations within a memory budget.

torch's partitioner selects the operators to recompute (a knapsack over bytes and floating-point
operations). Invariant: operators that draw random numbers or read inputs that the step mutates run
once, so with "aot_eager" the gradients equal those without a budget bit by bit. Inductor fuses
recomputed operators with others and sums in another order: FP32 gradients differ by about 3e-7,
relative, and BF16 gradients by more, as it omits roundings inside a fused kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import register_flop_formula

from qsync_fx import torch_internals as internals

aten = torch.ops.aten
qsync = torch.ops.qsync

_LEAST: Final = 1e-9
"""Budget used instead of 0, at which torch's partitioner ignores MUST_SAVE."""

Shape = Sequence[int]


class WithinBudget(internals.CustomPartitionerFn):
    """Partitioner that limits the saved activations, and runs another, torch's by default.

    Attributes:
        budget: share of the saved bytes, between those without recomputation (1) and those if all
            operators are recomputed that draw no random numbers (0).
    """

    def __init__(self, budget: float, partition: Any = None) -> None:
        self.budget, self.partition = budget, partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.partition or internals.min_cut_rematerialization_partition
        register_flops()
        save_unrepeatable(gm.graph)
        # Without the first, products of this package count as pointwise and are always recomputed.
        settings: dict[str, Any] = {"is_non_builtin_to_include": True}
        settings["activation_memory_budget"] = max(self.budget, _LEAST)
        with internals.functorch_config.patch(**settings):
            result = partition(gm, joint_inputs, **kwargs)
        if _saves_tuple(result[0], kwargs["num_fwd_outputs"]):
            # Without an operator to select, torch's knapsack saves tuples marked MUST_SAVE, which
            # autograd cannot. The cut without a knapsack is then the least that can be saved.
            settings |= {"activation_memory_budget": 1.0, "aggressive_recomputation": True}
            with internals.functorch_config.patch(**settings):
                result = partition(gm, joint_inputs, **kwargs)
        forward, backward = result
        return forward, backward

    def uuid(self) -> Any:
        files = internals.get_hash_for_files((__file__,))
        return files, self.budget, self.partition and self.partition.uuid()


def _saves_tuple(forward: fx.GraphModule, outputs: int) -> bool:
    saved: Any = forward.graph.output_node().args[0]
    nodes = (node for node in saved[outputs:] if isinstance(node, fx.Node))
    return any(isinstance(node.meta.get("val"), tuple | list) for node in nodes)


def save_unrepeatable(graph: fx.Graph) -> None:
    """Mark operators to be saved that draw random numbers or read inputs that the step mutates.

    The backward pass would draw other numbers, and read such inputs after the mutation. Operators
    that contain graphs may do either.
    """
    mutated = _mutated_inputs(graph)
    for node in graph.nodes:
        target = node.target
        if isinstance(target, internals.OpOverload):
            reads = not mutated.isdisjoint(node.all_input_nodes) and not _trains_norm(node)
            if reads and target.is_view:
                mutated.add(node)  # torch's partitioner does not save views
            elif reads or torch.Tag.nondeterministic_seeded in target.tags:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        elif isinstance(target, internals.HigherOrderOperator):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _mutated_inputs(graph: fx.Graph) -> set[fx.Node]:
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    result = {node.args[0] for node in copies}
    # Mutations outside of the graph are among its outputs.
    outputs = graph.output_node().meta.get("desc") or ()
    mutations = [item for item in outputs if isinstance(item, internals.InputMutationAOTOutput)]
    inputs = [item.mutated_input for item in mutations]
    placeholders = graph.find_nodes(op="placeholder")
    result.update(node for node in placeholders if node.meta.get("desc") in inputs)
    return result


def _trains_norm(node: fx.Node) -> bool:
    """Return whether a batch norm only updates the running statistics that it reads."""
    if node.target is aten._native_batch_norm_legit_functional.default:
        return node.args[5] is True
    return node.target is aten._batch_norm_with_update_functional.default


@functools.cache
def register_flops() -> None:
    """Register the operations of this package's products with torch's FLOP counter."""

    def matrices(a: Shape, *others: Any, out_shape: Shape, **settings: Any) -> int:
        return 2 * math.prod(out_shape) * a[-1]

    def convolution(a: Shape, b: Shape, *others: Any, out_shape: Shape, **settings: Any) -> int:
        return 2 * math.prod(out_shape) * math.prod(b[1:])

    register_flop_formula([qsync.gemm, qsync.integer_products, qsync.grouped_products])(matrices)
    register_flop_formula([qsync.conv2d_product, qsync.integer_convolution])(convolution)
