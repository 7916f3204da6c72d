"""One derivative and no second: what is computed from rounded values has a gradient by decree, and that gradient has none.

Rounding is flat between its steps, so that a gradient passes straight through it is a convention, and its derivative would be one
more. Torch's own `once_differentiable` takes the gradient for a constant where the incoming one is: with a sum as the loss, a gradient
penalty would be missing from the gradients without a word.

Invariant: a derivative of what `first_only` has guarded raises, whatever it is taken of. A backward pass that nobody differentiates
computes what it computes without.
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
"""Options under which everything has a second derivative that has one in torch."""

Backward = Callable[..., tuple[Tensor | None, ...]]

_places: ContextVar[Mapping[int, str] | None] = ContextVar("qsync_places", default=None)


@contextmanager
def placed(places: Mapping[int, str]) -> Iterator[None]:
    """Lets the operators that run in it know where they stand in the user's model: stream -> where."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def place(stream: int) -> str | None:
    """Returns where the operator with this stream stands in the user's model; None where that is not known, as in compiled code."""
    return (_places.get() or {}).get(stream)


def link() -> Tensor:
    """Returns what a lowered operator gives beside its result, and saves: an output without values, which leads back to its inputs."""
    return torch.empty(0)


def refuse(
    gradients: tuple[Tensor | None, ...],
    links: tuple[Tensor | None, ...],
    problem: Callable[[], QSyncError],
) -> tuple[Tensor | None, ...]:
    """Returns gradients whose own derivatives raise `problem()`, those by whatever `links` depend on too."""
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
        return tuple(None if g is None else g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise ctx.problem()


def first_only(backward: Backward) -> Backward:
    """Decorates the backward pass of a lowered operator. Its context has `fmt`, the format's name, and `place`, and saves `link()` last."""

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
        f"there is no second derivative in {fmt}: its gradient is computed from rounded values",
        where=where or f"an operator in {fmt}",
        do=f"plan it in fp32 or bf16, as {WAY_OUT} does for all operators",
    )
