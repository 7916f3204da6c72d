"""Splits what Dynamo wrote into pieces that are re-traced and pieces that stay.

Invariant: every computing node is in one piece, in the order of the graph. What stays is what make_fx must not trace through: higher-order
operators (it raises KeyError on checkpointing's context function, and would inline a custom autograd function's forward, losing its
backward), switches of autocast and grad mode (they are states that last beyond a piece), what hooks gradients, and functorch regions (their
values are batched tensors, which exist only inside).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental._backward_state import BackwardState
from torch.utils.hooks import BackwardHook

from qsync_fx.graph.effects.modes import is_switch


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes: either re-traced together, or kept as Dynamo wrote them."""

    nodes: tuple[fx.Node, ...]
    kept: bool


def pieces(graph: fx.Graph) -> Iterator[Piece]:
    """Splits a graph's computing nodes into pieces to re-trace and pieces to keep."""
    current: list[fx.Node] = []
    kept: set[fx.Node] = set()
    nesting = 0
    region: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        before = nesting
        nesting += _functorch_step(node)
        if before or nesting:
            region.append(node)
            if nesting == 0:
                yield from ([Piece(tuple(current), kept=False)] if current else [])
                yield Piece(tuple(region), kept=True)
                kept.update(region)
                current, region = [], []
        elif _stays(node) or _unpacks(node, kept):
            yield from ([Piece(tuple(current), kept=False)] if current else [])
            yield Piece((node,), kept=True)
            kept.add(node)
            current = []
        else:
            current.append(node)
    if region or current:
        yield Piece(tuple(current + region), kept=bool(region))


def _stays(node: fx.Node) -> bool:
    return is_switch(node) or isinstance(node.target, torch._ops.HigherOrderOperator) or hooks_gradients(node)


def hooks_gradients(node: fx.Node) -> bool:
    """Whether a node puts a hook on a tensor, which sees the tensor's gradient."""
    known = (used.meta.get("example_value") for used in node.all_input_nodes)
    return any(isinstance(value, (BackwardState, BackwardHook)) for value in known)


def _unpacks(node: fx.Node, kept: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in kept


def _functorch_step(node: fx.Node) -> int:
    name = getattr(node.target, "__name__", "")
    if "increment_nesting" in name:
        return 1
    return -1 if "decrement_nesting" in name else 0
