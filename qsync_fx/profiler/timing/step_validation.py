"""The first run of a user's step, which shows whether it is a step at all.

Invariant: what passes here returned a loss that is a number, and left it to its caller to differentiate that.

A model compiled under one plan after another.

Invariant: Dynamo's limit of versions holds none of them up, and nothing of them is left: code of the model that was compiled meanwhile is
dropped, and the user's own is compiled anew when it is called next. What runs in a model (`plan_coverage`) says nothing of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, Final

import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code

from qsync_fx.coverage.compilation_log import collecting
from qsync_fx.errors import ProfileError
from qsync_fx.options import Options
from qsync_fx.profiler.timing.step_timers import StepFunction, TrainingStep, checked_loss, finite

Compiled = Callable[..., Any]
_ANY = 2**16


@contextlib.contextmanager
def compiling() -> Iterator[Callable[[nn.Module, Mapping[str, object], TrainingStep], Compiled]]:
    """Yields what compiles a module with some options, by training it for one step."""
    codes: set[CodeType] = set()

    def compile_with(
        module: nn.Module, options: Mapping[str, object], training: TrainingStep
    ) -> Compiled:
        inputs: dict[str, Any] = dict(options)
        with collecting(Options.parse(options)) as log:
            compiled: Compiled = torch.compile(
                module, backend="qsync", options=inputs, dynamic=False
            )
            training.run(compiled)
            codes.update(code for code, _ in log.frames)
        return compiled

    with torch._dynamo.config.patch(recompile_limit=_ANY, accumulated_recompile_limit=_ANY):
        try:
            yield compile_with
        finally:
            for code in codes:
                reset_code(code)


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

    leaves = [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
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
