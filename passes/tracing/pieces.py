"""Splits what Dynamo wrote into pieces that are re-traced and pieces that stay.

Invariant: every computing node is in one piece, in the order of the graph. make_fx must not trace
through the following nodes, which stay:

- higher-order operators: it raises KeyError on checkpointing's context function, and would inline a
  custom autograd function's forward, losing its backward;
- calls that change state of the process: it lasts beyond a piece, and tracing does not record them;
- nodes that hook gradients;
- regions between levels of functorch or of forward-mode differentiation: their values are batched or
  dual tensors, which exist only inside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental._backward_state import BackwardState
from torch.utils.hooks import BackwardHook

from qsync_fx.graph.effects.modes import is_switch, level_step


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes: either re-traced together, or kept as Dynamo wrote them."""

    nodes: tuple[fx.Node, ...]
    kept: bool
    leveled: bool = False
    """Whether the nodes are between the entry and the exit of a level."""


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
        nesting += level_step(node)
        if before or nesting:
            region.append(node)
            if nesting == 0:
                yield from ([Piece(tuple(current), kept=False)] if current else [])
                yield Piece(tuple(region), kept=True, leveled=True)
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
        yield Piece(tuple(current + region), kept=bool(region), leveled=bool(region))


def _stays(node: fx.Node) -> bool:
    return is_switch(node) or isinstance(node.target, torch._ops.HigherOrderOperator) or hooks_gradients(node)


def hooks_gradients(node: fx.Node) -> bool:
    """Whether a node puts a hook on a tensor, which sees the tensor's gradient."""
    known = (used.meta.get("example_value") for used in node.all_input_nodes)
    return any(isinstance(value, (BackwardState, BackwardHook)) for value in known)


def _unpacks(node: fx.Node, kept: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in kept
