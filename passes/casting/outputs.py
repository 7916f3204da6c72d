"""Gives the outputs of a graph back the types that Dynamo expects, and the memory that they share.

Invariant: outputs that share memory in the model share it here: what a user writes to one shows in the others, and in their gradients. So
where several outputs are views of a tensor in another format, the tensor is cast once, and what made views of it is repeated on the cast.
"""

from __future__ import annotations

import operator as py_operator
from collections import Counter
from collections.abc import Hashable

import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.effects.writes import in_place, writes
from qsync_fx.graph.values import is_float, tensors
from qsync_fx.passes.casting.casts import Casts


def cast_outputs(casts: Casts, output: fx.Node) -> None:
    """Rewrites the arguments of the output node."""
    memory = casts.sharing.memory
    returned = output.all_input_nodes
    sharers: Counter[Hashable] = Counter(place for used in returned for place in memory.of(used))
    repeated: dict[fx.Node, fx.Node] = {}

    def cast(used: fx.Node) -> fx.Node:
        own = casts.own.get(used)
        value = casts.graph.value(used)
        alone = all(sharers[place] == 1 for place in memory.of(used))
        if alone or own is None or not is_float(value) or value.dtype is own:
            return casts.shared(output, used, own)
        return repeat(used, own)

    def repeat(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node not in repeated:
            viewed = _viewed(casts, node)
            if viewed is None:
                repeated[node] = casts.shared(output, node, dtype)
            elif in_place(node):
                repeated[node] = repeat(viewed, dtype)
            else:
                base = repeat(viewed, dtype)
                with casts.graph.graph.inserting_before(output):
                    repeated[node] = casts.again(node, viewed, base)
        return repeated[node]

    output.args = fx.node.map_arg(output.args, cast)


def _viewed(casts: Casts, node: fx.Node) -> fx.Node | None:
    """Returns the node whose memory and type a node's value has; None for a value of its own, and for an input."""
    memory = casts.sharing.memory
    if node.op != "call_function" or meta.is_cast(node):
        return None
    if in_place(node):
        return writes(node)[0]
    if node.target is not py_operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
        return None
    types = {t.dtype for t in tensors(casts.graph.value(node))}
    for used in node.all_input_nodes:
        if memory.of(used) & memory.of(node) and {t.dtype for t in tensors(casts.graph.value(used))} == types:
            return used
    return None
