"""The first run of a user's step, which shows whether it is a step at all.

Invariant: what passes here returned a loss that is a number, and left it to its caller to differentiate that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from qsync_fx.errors import ProfileError
from qsync_fx.profiling.measuring.steps import StepFunction, checked_loss, finite

_TWICE: Final = "backward through the graph a second time"
"""What torch says of a loss that was differentiated before."""


def checking(step: StepFunction, module: nn.Module) -> StepFunction:
    """Returns a step that raises `ProfileError` where it differentiates the loss itself, or gives one that trains nothing."""

    def checked(model: Any, batch: Any) -> Tensor:
        with _watched(module):
            loss = step(model, batch)
        return finite(checked_loss(loss, "step"), "step")

    return checked


@contextmanager
def _watched(module: nn.Module) -> Iterator[None]:
    """Raises what is wrong from within the user's own backward(), so that a traceback shows it."""

    def accumulated(_: Tensor) -> None:
        raise _differentiated("step")

    leaves = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.is_leaf]
    hooks = [leaf.register_post_accumulate_grad_hook(accumulated) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def left_to_us(where: str) -> Iterator[None]:
    """Raises `ProfileError` where a loss turns out to have been differentiated before, where parameters cannot be watched."""
    try:
        yield
    except RuntimeError as error:
        if _TWICE in str(error):
            raise _differentiated(where) from error
        raise


def _differentiated(where: str) -> ProfileError:
    return ProfileError(
        "the step calls backward() itself, and its caller does so with the loss that it returns",
        where=where,
        do="let step(model, batch) return the loss, without backward() and without the optimizer's step()",
    )
