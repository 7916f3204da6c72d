"""`qsync::attention`: attention as two products with a softmax between them, where that is faster than torch's fused kernel.

Why composite: AOTAutograd traces into it, the products are torch's own, and Inductor fuses scale and softmax into one pass.

Invariant: which attention that is, `qsync_fx.graph.attention` says. Operands and result lie in the format that was decided.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from qsync_fx.backend.operators.library import define
from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.attention import FUSED, MOST_TOKENS, as_products, products

_REASON: Final = f"computed as products, which are faster than torch's fused kernel up to {MOST_TOKENS} tokens"

define(
    "attention(Tensor query, Tensor key, Tensor value, float? scale=None) -> Tensor",
    {"CompositeImplicitAutograd": products},
)


def attend_by_products(graph: PrecisionGraph) -> None:
    """Puts products in the place of the attention of a graph that has been lowered, where they are faster.

    What checkpointing computes again stays as it is: it keeps nothing, and its memory is what the checkpoint saves.
    """
    context, trained = graph.context, _trained(graph)
    if not context.training:
        return
    for node in graph.nodes:
        note = meta.NOTE.get(node)
        if node.target is not FUSED or note is None:
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), graph.value)
        need = any(used in trained for used in node.all_input_nodes)
        if not as_products(node.target, args, kwargs, need, context.device, context.options):
            continue
        with graph.graph.inserting_before(node):
            given: tuple[Any, ...] = (*node.args[:3], node.kwargs.get("scale"))
            new = graph.graph.call_function(torch.ops.qsync.attention.default, given)
        meta.take_over(new, node)
        graph.propagate(new)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        operator = next(one for one in graph.own_operators() if one.node is new)
        operator.update(reason=f"{note.reason}; {_REASON}" if note.reason else _REASON)
    graph.module.recompile()


def _trained(graph: PrecisionGraph) -> set[fx.Node]:
    """Returns the nodes that a gradient may flow back to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        leaf = node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) and value.requires_grad
        if leaf or any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found
