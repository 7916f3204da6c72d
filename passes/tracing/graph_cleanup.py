"""Cleanup of traced graphs: in-place writes, no-op conversions, fused transformer operators.

Invariant: the graph computes the same values and gradients, with fewer restrictions on precision. A
conversion that names a dtype counts as the model's request for it, even if it is a no-op.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from qsync_fx import torch_internals as internals
from qsync_fx.graph.alias_analysis import AliasSets, in_place, writes
from qsync_fx.graph.fx_utils import is_float, storage_of, switches_grad
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops import row_for
from qsync_fx.ops.spec import Kind


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Attribute traced operators to a child of the module that calls the fused operator."""
    meta = fx.traceback.get_current_meta()
    stack = meta.get("nn_module_stack")
    if not stack:
        yield
        return
    address, (path, kind) = list(stack.items())[-1]
    meta["nn_module_stack"] = {**stack, f"{address}.{name}": (f"{path}.{name}", kind)}
    try:
        yield
    finally:
        meta["nn_module_stack"] = stack


def _attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor,
    qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
    need_weights: bool = True, average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `nn.MultiheadAttention`; mask types: 0 [L, L], 1 key padding, 2 [N, heads, L, L]."""
    masks: dict[str, Any] = {"key_padding_mask": None, "attn_mask": None}
    if mask is not None and mask_type == 1:
        masks["key_padding_mask"] = mask
    elif mask is not None:
        masks["attn_mask"] = mask.flatten(0, 1) if mask_type == 2 else mask
    transposed = query.transpose(1, 0)
    out, weights = F.multi_head_attention_forward(
        transposed, transposed, transposed, embed_dim, num_heads, qkv_weight, qkv_bias,
        None, None, False, 0.0, proj_weight, proj_bias, training=False, need_weights=need_weights,
        average_attn_weights=average_attn_weights, **masks,
    )  # fmt: skip
    return out.transpose(1, 0), weights


def _encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
    ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `nn.TransformerEncoderLayer` as in training: plans mean the same in both modes."""

    def attend(x: Tensor) -> Tensor:
        with _inside("self_attn"):
            return _attention(
                x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
                False, mask_type=mask_type,
            )[0]  # fmt: skip

    def feed(x: Tensor) -> Tensor:
        with _inside("linear1"):
            x = F.linear(x, ffn_weight_1, ffn_bias_1)
        x = F.gelu(x) if use_gelu else F.relu(x)
        with _inside("linear2"):
            return F.linear(x, ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, name: str, weight: Tensor, bias: Tensor) -> Tensor:
        with _inside(name):
            return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attend(norm(src, "norm1", norm_weight_1, norm_bias_1))
        return src + feed(norm(src, "norm2", norm_weight_2, norm_bias_2))
    src = norm(src + attend(src), "norm1", norm_weight_1, norm_bias_1)
    return norm(src + feed(src), "norm2", norm_weight_2, norm_bias_2)


UNFUSED: Mapping[Any, Callable[..., Any]] = {
    internals._transformer_encoder_layer_fwd: _encoder_layer,
    internals._native_multi_head_attention: _attention,
}


def without_idle_conversions(graph: PrecisionGraph) -> None:
    """Remove no-op conversions whose memory is written, read by strides or returned twice.

    `y.float().add_(1)` writes to an FP32 `y`, `y, y.float()[0]` returns two views of one tensor,
    and `y[::2].float().as_strided(...)` reads values of `y` outside its operand. The model uses
    such a conversion for the memory of its input, so it must return its input in every format.
    """
    conversions = [node for node in graph.nodes if getattr(row_for(node.target), "converts", False)]
    if not conversions:
        return
    memory = AliasSets(graph)
    returned = graph.nodes[-1].all_input_nodes
    leaving: Counter[Hashable] = Counter(place for used in returned for place in memory.of(used))
    strided = [node for node in graph.nodes if node.target is torch.ops.aten.as_strided.default]
    by_strides = frozenset(place for node in strided for place in memory.of(node))
    for node in conversions:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if graph.value(source).dtype is not graph.value(node).dtype:
            continue
        shared = memory.of(node) & memory.of(source)
        if shared & (memory.written | by_strides) or any(leaving[place] > 1 for place in shared):
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


def without_needless_writes(graph: PrecisionGraph) -> None:
    """Replace in-place operators by plain ones if only the dtype restriction changes.

    `y = relu_(x)` becomes `y = relu(x)`, and later readers of x read y. This requires that x is the
    result of an operator in this graph (not an input, attribute or view) and has no views.
    """
    if any(switches_grad(node) for node in graph.nodes):
        # Under no_grad an in-place write preserves the tensor's autograd history, which a plain
        # operator would cut.
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    replaced: set[fx.Node] = set()
    for node in graph.nodes:
        plain = _plain_target(node)
        if plain is None:
            continue
        (written,) = writes(node)
        earlier = [user for user in written.users if order[user] < order[node]]
        if not (
            node.args[0] is written
            and written.op == "call_function"
            and not in_place(written)
            and all(map(_returns_fresh, (written, *earlier)))
            and _same_type(graph, node, written)
            and _outcome(graph, node, node.target) == _outcome(graph, node, plain)
        ):
            continue
        node.target = plain
        node._rename(plain._schema.name.partition("::")[2])
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)
        replaced.add(node)
    _move_out(graph, replaced)


def _move_out(graph: PrecisionGraph, replaced: set[fx.Node]) -> None:
    """Recompute the values of replaced nodes and of their views."""
    moved: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        before = graph.value(node)
        views = isinstance(before, torch.Tensor) and any(
            used in moved and storage_of(before) == storage_of(moved[used])
            for used in node.all_input_nodes
        )
        if node in replaced or views:
            moved[node] = before
            graph.propagate(node)


def _plain_target(node: fx.Node) -> Any:
    target = node.target
    if not isinstance(target, internals.OpOverload) or len(writes(node)) != 1:
        return None
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def _returns_fresh(node: fx.Node) -> bool:
    """Return whether a node's result certainly shares no memory with other values."""
    if node.op == "output":
        return True
    target = node.target
    if not isinstance(target, internals.OpOverload):
        return False
    if target.has_kernel_for_dispatch_key(internals.DispatchKey.CompositeImplicitAutograd):
        # A composite operator may return its input although its schema does not say so, such as
        # dropout in evaluation.
        row = row_for(target)
        return row is not None and row.kind is Kind.ADJUSTABLE
    return all(result.alias_info is None for result in target._schema.returns)


def _outcome(graph: PrecisionGraph, node: fx.Node, target: Any) -> object:
    """Return the result's dtype, shape and gradient formula, which may differ in place (`elu_`)."""

    def fresh(used: fx.Node) -> Any:
        value = graph.value(used)
        if not isinstance(value, torch.Tensor):
            return value
        leaf = torch.empty_like(value)
        if used is node.args[0] and is_float(value):
            return leaf.requires_grad_().clone()
        return leaf

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), fresh)
    try:
        with (
            torch.enable_grad(),
            torch.autocast(graph.context.device.type, enabled=False),
            internals.enable_python_dispatcher(),
        ):
            result = target(*args, **kwargs)
            return result.dtype, result.shape, type(result.grad_fn)
    except Exception:  # noqa: BLE001 - an operator that fails is not equivalent
        return object()


def _same_type(graph: PrecisionGraph, node: fx.Node, written: fx.Node) -> bool:
    ours = graph.value(written)
    operands = [v for v in map(graph.value, node.all_input_nodes) if isinstance(v, torch.Tensor)]
    dtypes = {v.dtype for v in operands if v.dtype.is_floating_point}
    # A plain operator promotes and broadcasts, an in-place write does neither.
    return dtypes == {ours.dtype} and all(v.dim() <= ours.dim() for v in operands)


def copied(graph: fx.Graph, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node in `graph` for one of Dynamo's nodes, usually a copy.

    A conversion without a dtype, such as `x.to(device)`, preserves the format of its input. Torch
    traces it with x's original dtype, which would count as the model's request; so it is removed if
    it is a no-op, and otherwise follows its tensor.
    """
    named = (*node.args, *node.kwargs.values())
    if node.op != "call_method" or node.target not in ("to", "cpu", "cuda"):
        return graph.node_copy(node, lambda used: local[used])
    source, *others = node.all_input_nodes
    before, after = (used.meta.get("example_value") for used in (source, node))
    names_dtype = any(isinstance(value, torch.dtype) for value in named)
    if names_dtype or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return graph.node_copy(node, lambda used: local[used])
    if before is after:
        return local[source]
    if before.dtype is after.dtype:
        options: dict[str, Any] = {"device": after.device}
        options |= {k: v for k, v in node.kwargs.items() if k in ("non_blocking", "memory_format")}
        new = graph.call_function(torch.ops.aten._to_copy.default, (local[source],), options)
    elif before.device == after.device and others:
        args = (local[source], local[others[0]])
        new = graph.call_function(torch.ops.aten.type_as.default, args)
    else:
        return graph.node_copy(node, lambda used: local[used])
    new.meta = dict(node.meta)
    return new
