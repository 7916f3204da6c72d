"""Second derivatives: who takes them, and what those are told who do not.

With the inner compiler "eager" the graph runs under torch's autograd, operator by operator, and what torch differentiates twice is:
all but the lowered operators, which say where they stand. AOTAutograd compiles a backward pass once, without one of its own.

Invariant: nothing is added to a training step but the call of one Python function a graph. Where a version of torch raises its error in
another way than those that the tests pin, its own words stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.gradients.derivatives import WAY_OUT, placed, refuse
from qsync_fx.errors import QSyncError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.nodes import arguments
from qsync_fx.graph.values import tensors

Compiled = Callable[..., Any]


def places(graph: PrecisionGraph) -> Mapping[int, str]:
    """Returns where the lowered operators of a graph stand in the user's model, by their streams."""
    found = {}
    for operator in graph.operators():
        if isinstance(operator.node.target, torch._ops.OpOverload):
            stream = arguments(operator.node).get("stream")
            if isinstance(stream, int):
                found[stream] = operator.where
    return found


def telling(compiled: Compiled, graph: PrecisionGraph, inner: str) -> Compiled:
    """Returns compiled code whose second derivatives, where there are none, say so in our words."""
    if inner == "eager":
        return _run_placed(compiled, places(graph))
    return _told(compiled, graph.where, inner) if graph.context.training else compiled


def _run_placed(run: Compiled, known: Mapping[int, str]) -> Compiled:
    if not known:
        return run

    @functools.wraps(run)
    def placed_run(*args: Any) -> Any:
        with placed(known):
            return run(*args)

    return placed_run


def _told(compiled: Compiled, where: str, inner: str) -> Compiled:
    """The node of autograd's graph is there once the code has run: what it does for a second derivative is put in place then, once."""
    done = False

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal done
        found = compiled(*args)
        if not done and torch.is_grad_enabled():
            done = _tell(found, where, inner)
        return found

    return run


def _tell(outputs: Any, where: str, inner: str) -> bool:
    """Whether the outputs hang on a node of AOTAutograd's, whose second derivatives say now that there are none."""
    node = next(filter(None, map(_compiled_node, tensors(outputs))), None)
    original = getattr(node, "_double_backward", None)
    if node is None or original is None:
        return node is not None

    def problem() -> QSyncError:
        return QSyncError(
            f'there is no second derivative of compiled code: "{inner}" compiles the backward pass, which has none of its own',
            where=where,
            do=f"compile what is differentiated twice with {WAY_OUT}, or with fp32",
        )

    def told(ctx: Any, run: Callable[[Any], Any], args: list[Any]) -> Any:
        found: tuple[Any, ...] = original(ctx, run, args)
        gradients = tuple(g if isinstance(g, Tensor) else None for g in found)
        return refuse(gradients, gradients, problem)

    node._double_backward = staticmethod(told)
    return True


def _compiled_node(tensor: Tensor) -> Any:
    """Returns the class of the node of AOTAutograd's that a result comes from, through views of it; None for a result without one."""
    node: Any = tensor.grad_fn
    while node is not None:
        kind = getattr(node, "_forward_cls", None)
        if hasattr(kind, "_double_backward"):
            return kind
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return None
