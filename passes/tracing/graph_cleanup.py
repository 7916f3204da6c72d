"""Writes in place become plain operators where nobody can tell.

Invariant: values and gradients are those of the in-place graph. `y = relu_(x)` becomes `y = relu(x)`, and later readers of x read y,
only if x is a fresh tensor of this graph (an operator's own result, not an input, attribute or view) of which no view exists. The
point is freedom of precision: the result of a write in place must have the format of what it writes to; that of a plain operator
need not.

Fused operators of torch's transformer modules, written as the operators that they stand for.

Without gradients `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call one operator that is a whole layer. Invariant: what stands
here is what the modules do in training, operator for operator and module for module, so that a plan means the same in evaluation.

Conversions that return their input, where it shows that they do.

`y.float().add_(1)` writes to an FP32 `y`, `y, y.float()[0]` returns two views of one tensor, and
`y[::2].float().as_strided(...)` reads values of `y` outside its operand. Invariant: that is so in every format. Such a
conversion expresses no wish for a format; the model uses it for the memory of its input.

Conversions that name no type: what goes to a device, or to where another tensor is, keeps the format that it has.

torch traces `x.to(device)` as a conversion to the type that x has in the model as written, which would be taken for the model's wish.
Invariant: a conversion that names a type is such a wish, also where it changes nothing as written: `scores.float()` is written for the
day that scores are narrow. One that names none is none: it is gone where it changes nothing, and elsewhere follows a tensor.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F

from qsync_fx.graph.alias_analysis import AliasSets, in_place, writes
from qsync_fx.graph.fx_utils import is_alias, is_float, switches_grad
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops import row_for
from qsync_fx.ops.spec import Kind


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Lays what is traced at the door of a child of the module that the fused operator belongs to."""
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
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`nn.MultiheadAttention` of a batch with itself; the type of a mask is 0: `[L, L]`, 1: of keys, 2: `[N, heads, L, L]`."""
    transposed = query.transpose(1, 0)
    out, weights = F.multi_head_attention_forward(
        transposed, transposed, transposed, embed_dim, num_heads, qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias,
        training=False, key_padding_mask=mask if mask_type == 1 else None, need_weights=need_weights,
        attn_mask=mask.flatten(0, 1) if mask is not None and mask_type == 2 else mask if mask_type == 0 else None,
        average_attn_weights=average_attn_weights,
    )  # fmt: skip
    return out.transpose(1, 0), weights


def _encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor,
    norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`nn.TransformerEncoderLayer`."""

    def attend(x: Tensor) -> Tensor:
        with _inside("self_attn"):
            return _attention(
                x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, mask_type=mask_type
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
    torch._transformer_encoder_layer_fwd: _encoder_layer,
    torch._native_multi_head_attention: _attention,
}


def without_idle_conversions(graph: PrecisionGraph) -> None:
    """Remove conversions without an effect if their memory is written, read by strides or returned twice."""
    conversions = [
        node for node in graph.nodes if (row := row_for(node.target)) is not None and row.converts
    ]
    if not conversions:
        return
    memory = AliasSets(graph)
    leaving: Counter[Hashable] = Counter(
        place for used in graph.nodes[-1].all_input_nodes for place in memory.of(used)
    )
    strided = [node for node in graph.nodes if node.target is torch.ops.aten.as_strided.default]
    by_strides = frozenset(place for node in strided for place in memory.of(node))
    for node in conversions:
        source, places = node.args[0], memory.of(node)
        if (
            not isinstance(source, fx.Node)
            or graph.value(source).dtype is not graph.value(node).dtype
        ):
            continue
        shared = places & memory.of(source)
        if shared & (memory.written | by_strides) or any(leaving[place] > 1 for place in shared):
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


def without_needless_writes(graph: PrecisionGraph) -> None:
    """Replaces in-place operators by plain ones where the invariant allows it."""
    if any(switches_grad(node) for node in graph.nodes):
        # Under no_grad a write in place keeps the tensor's history, which a plain operator would cut.
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    replaced: set[fx.Node] = set()
    for node in graph.nodes:
        plain = _plain_target(node)
        if plain is None:
            continue
        (written,) = writes(node)
        if (
            node.args[0] is not written
            or not _is_fresh(written)
            or not _same_type(graph, node, written)
        ):
            continue
        if any(not _returns_fresh(user) for user in written.users if order[user] < order[node]):
            continue
        if _outcome(graph, node, node.target) != _outcome(graph, node, plain):
            continue
        node.target = plain
        node._rename(plain._schema.name.partition("::")[2])
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)
        replaced.add(node)
    _move_out(graph, replaced)


def _move_out(graph: PrecisionGraph, replaced: set[fx.Node]) -> None:
    """Gives what is a tensor of its own now, and the views of it, values that share no memory with the tensor that was written to."""
    moved: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        before = graph.value(node)
        views = isinstance(before, torch.Tensor) and any(
            used in moved and is_alias(before, moved[used]) for used in node.all_input_nodes
        )
        if node in replaced or views:
            moved[node] = before
            graph.propagate(node)


def _plain_target(node: fx.Node) -> Any:
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or not target._schema.name.endswith("_")
        or len(writes(node)) != 1
    ):
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and _returns_fresh(node) and not in_place(node)


def _returns_fresh(node: fx.Node) -> bool:
    """Whether a node's result shares no memory with anything: told by the schema, for operators whose schema tells the truth."""
    if node.op == "output":
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    row = row_for(target)
    if torch._C._dispatch_has_kernel_for_dispatch_key(
        _qualified_name(target), "CompositeImplicitAutograd"
    ):
        # A composite operator may return its input without saying so (dropout in evaluation does).
        return row is not None and row.kind is Kind.ADJUSTABLE
    return all(result.alias_info is None for result in target._schema.returns)


def _qualified_name(target: torch._ops.OpOverload) -> str:
    schema = target._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _outcome(graph: PrecisionGraph, node: fx.Node, target: Any) -> object:
    """What a target makes of a node's arguments: type, shape and the formula of its gradient.

    Some formulas differ in place, where `elu_` has its result alone to go by; a comparison in place gives numbers, not truth values; and
    an operator without its underscore may be another one.
    """

    def fresh(used: fx.Node) -> Any:
        value = graph.value(used)
        if not isinstance(value, torch.Tensor):
            return value
        leaf = torch.empty_like(value)
        return leaf.requires_grad_().clone() if used is node.args[0] and is_float(value) else leaf

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), fresh)
    try:
        with (
            torch.enable_grad(),
            torch.autocast(graph.context.device.type, enabled=False),
            enable_python_dispatcher(),
        ):
            result = target(*args, **kwargs)
            return result.dtype, result.shape, type(result.grad_fn)
    except Exception:  # noqa: BLE001 - whatever stops it, it does not do the same
        return object()


def _same_type(graph: PrecisionGraph, node: fx.Node, written: fx.Node) -> bool:
    ours = graph.value(written)
    operands = [graph.value(used) for used in node.all_input_nodes]
    dtypes = {
        v.dtype for v in operands if isinstance(v, torch.Tensor) and v.dtype.is_floating_point
    }
    shapes = [v.shape for v in operands if isinstance(v, torch.Tensor)]
    # A plain operator promotes and broadcasts where a write in place does not.
    return dtypes == {ours.dtype} and all(len(shape) <= ours.dim() for shape in shapes)


_MOVES = ("to", "cpu", "cuda")


def copied(graph: fx.Graph, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns what stands in `graph` for a node of Dynamo's, mostly a copy; `local` has what stands there for its operands."""
    if node.op == "call_method" and node.target in _MOVES and not _names_a_type(node):
        source, *others = node.all_input_nodes
        before, after = (used.meta.get("example_value") for used in (source, node))
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            if before is after:
                return local[source]
            if before.dtype is after.dtype:
                return _as_it_is(graph, node, local[source], after.device)
            if before.device == after.device and others:
                return _described(
                    graph.call_function(
                        torch.ops.aten.type_as.default, (local[source], local[others[0]])
                    ),
                    node,
                )
    return graph.node_copy(node, lambda used: local[used])


def _names_a_type(node: fx.Node) -> bool:
    return any(
        isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values())
    )


def _as_it_is(graph: fx.Graph, node: fx.Node, source: fx.Node, device: torch.device) -> fx.Node:
    """A copy elsewhere, or in another layout, of the type that the source turns out to have."""
    options: dict[str, Any] = {
        name: node.kwargs[name] for name in ("non_blocking", "memory_format") if name in node.kwargs
    }
    return _described(
        graph.call_function(
            torch.ops.aten._to_copy.default, (source,), {"device": device, **options}
        ),
        node,
    )


def _described(new: fx.Node, node: fx.Node) -> fx.Node:
    new.meta = dict(node.meta)
    return new
