"""Nodes that change a mode, autocast or the recording of gradients, rather than compute a value.

Invariant: told by what a node calls; works on graphs as Dynamo writes them and as passes leave them.
"""

from __future__ import annotations

from torch import fx

_SWITCHES = (
    "_enter_autocast",
    "_exit_autocast",
    "_set_grad_enabled",
    "_enter_inference_mode",
    "_exit_inference_mode",
)


def is_switch(node: fx.Node) -> bool:
    """Whether a node changes a mode (autocast, grad) rather than compute a value."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _SWITCHES


def switches_grad(node: fx.Node) -> bool:
    """Whether a node changes whether gradients are recorded."""
    return is_switch(node) and "autocast" not in getattr(node.target, "__name__", "")
