"""The seconds that a rank computes itself in a step, without those in which it waits for others.

A pass of the model begins where what is compiled is called, and ends with the last gradient that autograd has made: after it,
DistributedDataParallel waits for the gradients of the others. The optimizer's step is added.

Invariant: hooks look at the clock and change nothing. Calls without gradients begin no pass, nor do those in a backward pass, which
compute anew what was not kept.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qsync_fx.switching import when_called

Clock = Callable[[], float]


class Pace:
    """The context, around training; `begin` and `end` stand around the optimizer's step.

    Args:
        model: as it is called, or with what is compiled in it.
        clock: in seconds.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._began: float | None = None
        self._last: float | None = None
        self._passes: list[float] = []
        self._optimizing = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pace:
        self._stack.callback(when_called(self._model, self._called))
        trained: list[Any] = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in trained:
            self._stack.callback(parameter.register_post_accumulate_grad_hook(self._gradient).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Notes that the optimizer's step begins."""
        self._close()
        self._optimizing = self._clock()

    def end(self) -> float | None:
        """Returns the seconds of one pass and the optimizer's step, as it ends; None where no pass was seen."""
        took, passes = self._clock() - self._optimizing, self._passes
        self._passes = []
        return statistics.fmean(passes) + took if passes else None

    def _called(self) -> None:
        if not (self._model.training and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        if self._last is not None:
            self._close()
        if self._began is None:
            self._began = self._clock()

    def _gradient(self, _: Any) -> None:
        self._last = self._clock()

    def _close(self) -> None:
        if self._began is not None and self._last is not None:
            self._passes.append(self._last - self._began)
        self._began = self._last = None
