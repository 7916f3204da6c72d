"""Calls that change state of the process (grad mode, autocast, ...) rather than compute a value.

Invariant: such a call is never dropped, although its result has no reader: a context that is entered
and never left changes the rest of the program. The table lists the calls of Dynamo's context managers
by the state that they change; `mark_unlisted` adds the calls that the table does not list. Works on
graphs as Dynamo writes them and as passes leave them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

import torch
from torch import fx

from qsync_fx.graph import meta


class Effect(Enum):
    """The state that a call changes."""

    GRAD = "whether gradients are recorded: grad mode and inference mode"
    AUTOCAST = "autocast"
    DTYPE = "the default dtype of floating-point tensors"
    DETERMINISTIC = "whether algorithms have to be deterministic"
    KERNELS = "which kernels may run: backends of SDPA, TF32"
    FORWARD_GRAD = "whether forward-mode gradients are recorded"
    HOOKS = "whether saved-tensor hooks are allowed"
    LEVEL = "the stack of functorch's and of forward-mode levels"
    UNLISTED = "state of a kind that this table does not list"


_CALLS: Mapping[Effect, tuple[str, ...]] = MappingProxyType(
    {
        Effect.GRAD: ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"),
        Effect.AUTOCAST: ("_enter_autocast", "_exit_autocast"),
        Effect.DTYPE: ("set_default_dtype",),
        Effect.DETERMINISTIC: ("_set_deterministic_algorithms",),
        Effect.KERNELS: ("_backend_from_string", "_sdpa_kernel", "set_float32_matmul_precision"),
        Effect.FORWARD_GRAD: ("_set_fwd_grad_enabled",),
        Effect.HOOKS: ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"),
        Effect.LEVEL: (
            "_vmap_increment_nesting",
            "_vmap_decrement_nesting",
            "_grad_increment_nesting",
            "_grad_decrement_nesting",
            "_jvp_increment_nesting",
            "_jvp_decrement_nesting",
            "_func_increment_nesting",
            "_func_decrement_nesting",
            "_enter_dual_level",
            "_exit_dual_level",
            "set_inplace_requires_grad_allowed",
            "push_dynamic_layer_stack",
            "pop_dynamic_layer_stack",
        ),
    }
)
_EFFECT_OF: Mapping[str, Effect] = {name: effect for effect, names in _CALLS.items() for name in names}

_DEFERRED = (Effect.KERNELS, Effect.FORWARD_GRAD, Effect.HOOKS, Effect.LEVEL)
"""State that tracing above autograd does not depend on."""


def effect_of(node: fx.Node) -> Effect | None:
    """Return which state a node changes; None for a node that computes a value."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return None
    listed = _EFFECT_OF.get(getattr(node.target, "__name__", ""))
    return listed or (Effect.UNLISTED if node in meta.UNLISTED else None)


def is_switch(node: fx.Node) -> bool:
    """Return whether a node changes state rather than computes a value."""
    return effect_of(node) is not None


def switches_grad(node: fx.Node) -> bool:
    """Return whether a node changes whether gradients are recorded."""
    return effect_of(node) is Effect.GRAD


def affects_tracing(node: fx.Node) -> bool:
    """Return whether nodes after this one trace differently, so that tracing has to execute it."""
    effect = effect_of(node)
    return effect is not None and effect not in _DEFERRED


def level_step(node: fx.Node) -> int:
    """Return by how much a node changes the number of levels: 1, 0 or -1."""
    name = getattr(node.target, "__name__", "") if effect_of(node) is Effect.LEVEL else ""
    if "increment_nesting" in name or name == "_enter_dual_level":
        return 1
    return -1 if "decrement_nesting" in name or name == "_exit_dual_level" else 0


def mark_unlisted(graph: fx.Graph) -> None:
    """Mark the calls in a graph of Dynamo's that have an effect which the table does not list.

    Dynamo notes the value of each node that computes one. A call without a value that reads and feeds
    only such calls can have no other purpose, and leaves no record in a trace.
    """
    calls = {node for node in graph.nodes if is_switch(node) or _is_bare_call(node)}
    while True:
        computing = {node for node in calls if not is_switch(node) and not calls.issuperset(_neighbours(node))}
        if not computing:
            break
        calls -= computing
    for node in calls:
        if not is_switch(node):
            meta.UNLISTED[node] = True


def _is_bare_call(node: fx.Node) -> bool:
    operators = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
    calls = node.op == "call_function" and not isinstance(node.target, operators)
    return calls and node.meta.get("example_value", node.meta.get("val")) is None


def _neighbours(node: fx.Node) -> list[fx.Node]:
    return [*node.all_input_nodes, *node.users]
