"""First derivatives only: the gradients of lowered operators refuse to be differentiated.

torch's own `once_differentiable` treats such a gradient as a constant if the incoming gradient is
one: with a sum as the loss, a gradient penalty would silently be missing.
Invariant: differentiating a gradient that `first_only` guards raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.errors import PrecisionError, QSyncError

WAY_OUT: Final = 'options={"precision": "bf16", "inner_backend": "eager"}'
"""Options under which all operators have the second derivatives that they have in torch."""

Backward = Callable[..., tuple[Tensor | None, ...]]

_places: ContextVar[Mapping[int, str] | None] = ContextVar("qsync_places", default=None)


@contextmanager
def placed(places: Mapping[int, str]) -> Iterator[None]:
    """Set the locations of operators in the user's model, by stream, while a graph runs."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def place(stream: int) -> str | None:
    """Return an operator's location in the user's model; None if unknown, as in compiled code."""
    return (_places.get() or {}).get(stream)


def link() -> Tensor:
    """Return an empty output that a lowered operator saves: it connects the graph to its inputs."""
    return torch.empty(0)


def refuse(
    gradients: tuple[Tensor | None, ...],
    links: tuple[Tensor | None, ...],
    problem: Callable[[], QSyncError],
) -> tuple[Tensor | None, ...]:
    """Return gradients whose derivatives, through `links` too, raise `problem()`."""
    anchor = torch.empty(0, requires_grad=True)
    result: tuple[Tensor | None, ...] = _Refused.apply(problem, gradients, anchor, *links)  # type: ignore[no-untyped-call]
    return result


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: Callable[[], QSyncError],
        gradients: tuple[Tensor | None, ...],
        *links: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.problem = problem
        return tuple(g if g is None else g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise ctx.problem()


def first_only(backward: Backward) -> Backward:
    """Decorate a backward whose ctx has `fmt` and `place`, and saves `link()` last."""

    @functools.wraps(backward)
    def guarded(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            result = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return result
        fmt, where = ctx.fmt, ctx.place
        return refuse(result, (*gradients, ctx.saved_tensors[-1]), lambda: _problem(fmt, where))

    return guarded


def _problem(fmt: str, where: str | None) -> QSyncError:
    return PrecisionError(
        f"an operator in {fmt} has no second derivative: its gradient is computed from rounded "
        "values",
        where=where or f"an operator in {fmt}",
        do=f"plan it in fp32 or bf16, as {WAY_OUT} does for all operators",
    )
