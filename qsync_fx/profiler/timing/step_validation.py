"""Validation of a user's step, and compilation of a model under several plans.

`checking` raises for a step that returns no finite loss or calls backward() itself. `compiling`
lifts Dynamo's recompile limits and resets the compiled code afterwards, so the user's own compiled
model recompiles at its next call. `plan_coverage` does not report these compilations.
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


CompileUnder = Callable[[nn.Module, Mapping[str, object], TrainingStep], Compiled]
"""Compiles a module with options of the backend, by training it for one step."""


@contextlib.contextmanager
def compiling() -> Iterator[CompileUnder]:
    """Yield a function that compiles a module with options by training it for one step."""
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
"""torch's error for a loss that was differentiated before."""


def checking(step: StepFunction, module: nn.Module) -> StepFunction:
    """Return a step that raises `ProfileError` for its own backward() or an invalid loss."""

    def checked(model: Any, batch: Any) -> Tensor:
        with _watched(module):
            loss = step(model, batch)
        return finite(checked_loss(loss, "step"), "step")

    return checked


@contextmanager
def _watched(module: nn.Module) -> Iterator[None]:
    """Raise from within the user's own backward(), so that the traceback shows it."""

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
    """Raise `ProfileError` for a loss that was already differentiated.

    This covers steps whose parameters cannot be watched with hooks.
    """
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
