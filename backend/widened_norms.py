"""Normalisations of narrow activations where torch's own kernels run one by one on CUDA: `inner="aot_eager"` and `inner="eager"`.

There, they take parameters of their input's type alone ("expected scalar type BFloat16 but found Float"); on a CPU, and in the code that
Inductor writes, statistics and parameters are FP32 beside a narrow input. Widened, they compute just that.

Invariant: results have the types that they had, and the bits of FP32 arithmetic rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_NORMS = (
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
)


def widened(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph, bodies within it too, with its normalisations of mixed types in FP32; changes it in place."""
    for one in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        found = [node for node in one.graph.nodes if node.target in _NORMS and _mixed(node)]
        for node in found:
            _widen(one.graph, node)
        if found:
            one.recompile()
    return module


def _mixed(node: fx.Node) -> bool:
    x, *others = (_dtype(operand) for operand in node.all_input_nodes)
    return x is not None and any(other is not None and other.itemsize > x.itemsize for other in others)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    x: Any = node.args[0] if node.args else node.kwargs["input"]
    dtype = _dtype(x)
    with graph.inserting_before(node):
        wide = graph.call_function(aten.to.dtype, (x, torch.float32))
    node.replace_input_with(x, wide)
    several = node.target in (aten.native_layer_norm.default, aten.native_group_norm.default)
    # Of what a native norm returns, the first is the activation; mean and deviation are FP32 as they are.
    results = [user for user in node.users if user.args[1] == 0] if several else [node]
    for result in results:
        with graph.inserting_after(result):
            narrow = graph.call_function(aten.to.dtype, (result, dtype))
        result.replace_all_uses_with(narrow, delete_user_cb=lambda user, narrow=narrow: user is not narrow)  # type: ignore[misc]
