"""One training step, timed.

Invariant: with one thread, times are of the processor, for this thread alone: they stay what they are when others load the machine, as far
as caches and memory let them, and when this process does something else beside. Several threads wait for one another, which counts as
computing, so there times are those of the clock on the wall.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.profiling.measuring.lines import Clock

StepFunction = Callable[[Any, Any], Tensor]
"""What a user writes: from a model and a batch to the loss."""


def clock_for(threads: int) -> Clock:
    """Returns the clock that times a thread from which torch computes with so many."""
    return time.thread_time if threads == 1 else time.perf_counter


def check_batches(batches: object) -> None:
    """Raise `OptionError` if `batches` is a single batch: iterating over a tensor gives steps of one row."""
    is_batch = (
        isinstance(batches, Mapping | str | bytes)
        or hasattr(batches, "__array__")  # tensors, arrays of NumPy, data frames
        or hasattr(batches, "_fields")  # a named tuple
        or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__"))
    )
    if is_batch:
        raise OptionError(
            f"batches is of type {type(batches).__name__}, which is one batch or none",
            where="batches",
            do="give a list of batches, [batch] for one, or a DataLoader",
        )


def first_batch(batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and an iterable over all batches including the first.

    Raises:
        OptionError: `batches` is a single batch, or there is none.
    """
    check_batches(batches)
    rest = iter(batches)
    for batch in rest:
        return batch, itertools.chain([batch], rest) if rest is batches else batches
    raise OptionError("there is no batch to measure with", where="batches", do="give at least one")


def checked_loss(loss: object, where: str) -> Tensor:
    """Returns what a user's step returned; raises `ProfileError` where that is no loss that trains anything."""
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        do = "return the loss of the batch, a tensor without dimensions"
        raise ProfileError(f"the step returned {what}, which is no loss", where=where, do=do)
    if not loss.requires_grad:
        what = "the loss depends on no parameter that requires a gradient"
        raise ProfileError(what, where=where, do="let the step compute it from what the model returns, with gradients")
    return loss


def finite(loss: Tensor, where: str) -> Tensor:
    """Returns a loss; raises `ProfileError` where it is NaN or infinite."""
    if not bool(loss.detach().isfinite()):
        what = f"the loss is {float(loss.detach())}"
        raise ProfileError(what, where=where, do="give a model and batches that train in FP32")
    return loss


class Watching(Protocol):
    """What times lines while a step runs, and is told which pass it is in."""

    backward: bool


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step and its parts."""

    forward: float
    backward: float
    optimizer: float

    @property
    def passes(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Training:
    """What one step takes, but for the model in the form that runs.

    Attributes:
        step: the user's.
        batch: what it is given.
        optimizer: None where there is none.
        zero: lets gradients go.
        clock: what times it.
    """

    step: StepFunction
    batch: Any
    optimizer: Optimizer | None
    zero: Callable[[], None]
    clock: Clock

    def run(self, model: Any, lines: Watching | None = None) -> StepSeconds:
        """Trains a model for one step; raises `ProfileError` where that gives no loss."""
        clock = self.clock
        start = clock()
        loss = checked_loss(self.step(model, self.batch), "step")
        middle = clock()
        if lines is not None:
            lines.backward = True
        loss.backward()  # type: ignore[no-untyped-call]
        end = clock()
        del loss
        optimized = clock()
        if self.optimizer is not None:
            self.optimizer.step()
        self.zero()
        return StepSeconds(middle - start, end - middle, clock() - optimized)
