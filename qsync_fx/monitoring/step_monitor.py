"""`monitor`: metrics of each optimizer step, and of the weights every few steps.

Optimizer hooks and gradient hooks of torch are the only contact with training.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from qsync_fx.communication.compressor_state import CompressorHandle
from qsync_fx.communication.statistics import DuoReport
from qsync_fx.distributed.agreement import uncompiled
from qsync_fx.errors import OptionError
from qsync_fx.monitoring.metric_sinks import Destination, MetricSink, sinks
from qsync_fx.monitoring.weight_statistics import weight_statistics
from qsync_fx.plan.cluster_plan import this_process
from qsync_fx.plan_switching import options_of, switch_count

EVERY: Final = 100
"""Least number of steps between statistics of weights, by default."""
SHARE: Final = 0.002
"""Largest share of the training time that statistics of weights take, by default."""


def monitor(
    model: nn.Module,
    to: Destination | Sequence[Destination],
    *,
    every: int | None = None,
    compression: CompressorHandle | None = None,
    first_step: int = 0,
) -> Monitor:
    """Return a monitor: `with qsync_fx.monitor(model, to="run.csv"): train()`.

    A step ends when an optimizer of parameters of the model has stepped. Each step gives
    these metrics; with several ranks, each rank gives its own.

    - `step_s`: wall seconds since the last step, without the monitor. The first step of a training
      has no duration, and steps that compile contain the compilation. On a GPU the host runs ahead,
      so only means over many steps are exact.
    - `predicted_s`: predicted seconds of a step, if the active plan has a prediction.
    - `waiting_s`, with several ranks: seconds from the last gradient of autograd to the optimizer.
      DistributedDataParallel waits for other ranks there; unscaling and clipping are included. With
      NCCL the GPU waits and not the host, so it is close to 0.
    - `sent_bytes`, `codec_s`, with `compression`: bytes that this rank sent, and seconds in codecs.
    - `monitor_s`: seconds of this monitor in the last step.

    Every `every` steps these metrics of each operator are added, as "underflow/encoder.fc/linear"
    (by default every 100 steps, or a multiple of it with which they take up to 0.2% of the time).
    They are computed outside compiled code from the parameters, by rounding to nearest in the
    format of the operator; scales in compiled code, activations, and gradients of activations are
    not measured. With FSDP they describe the shard of this rank. An operator is included if its
    module has exactly one parameter of two or more dimensions. Norm and scale cover all values,
    the other metrics up to 16384 evenly spaced values of a weight.

    - `gradient_norm`: L2 norm of the weight's gradient, as the optimizer has read it.
    - `saturation`: share of weights at the largest magnitude of the format.
    - `underflow`: share of weights that are not zero and round to zero.
    - `rounding_error`: squared rounding error relative to the squared norm of the weight.
    - `scale`: the scale, or the largest one if each channel has its own; only scaled formats.

    Args:
        model: the trained module, compiled or not, or a DistributedDataParallel of it.
        to: a path that ends with ".csv" (with several ranks, "run.csv" becomes "run.rank1.csv"),
            "tensorboard", "wandb" (the active run, or a new one), a SummaryWriter, a run of wandb,
            a callable that receives a step number and a dictionary of floats, or a list.
        every: steps between statistics of weights; 0 for never, None for the default.
        compression: the result of `qsync_fx.distributed.compress`.
        first_step: number of steps before, of a run that is resumed.

    Raises:
        OptionError: an argument is invalid, or a package is not installed.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"monitor requires a torch.nn.Module, not {type(model).__name__}",
            do="pass the model that is trained",
        )
    for name, value in (("every", 0 if every is None else every), ("first_step", first_step)):
        if not isinstance(value, int) or value < 0:
            raise OptionError(
                f"{name} must be a number of steps, not {value!r}",
                where=f"qsync_fx.monitor(..., {name}=...)",
                do="use an integer of 0 or more",
            )
    if compression is not None and not isinstance(compression, CompressorHandle):
        raise OptionError(
            f"compression must be a handle, not {type(compression).__name__}",
            where="qsync_fx.monitor(..., compression=...)",
            do="pass the result of qsync_fx.distributed.compress",
        )
    return Monitor(model, sinks(to), every, compression, first_step)


class Monitor:
    """Context that reports metrics of one training, created by `monitor`.

    Attributes:
        step: number of the last step that ended.
    """

    def __init__(
        self,
        model: nn.Module,
        destinations: Sequence[MetricSink],
        every: int | None,
        compression: CompressorHandle | None,
        first_step: int,
    ) -> None:
        self.step = first_step
        self._model, self._sinks = model, destinations
        self._every = EVERY if every is None else every
        self._pause = 1 / SHARE if every is None else 0.0  # seconds per second of statistics
        self._statistics_due = 0.0  # by time.perf_counter
        self._compression = compression
        self._stack = contextlib.ExitStack()
        self._parameters = {id(p) for p in model.parameters()}
        self._depth = 0  # of nested steps: optimizers of shards step within another one
        self._ended = self._last_gradient = math.nan
        self._waiting = self._overhead = math.nan
        self._sent, self._coding = 0, 0.0
        self._prediction, self._switches = math.nan, -1

    def __enter__(self) -> Monitor:
        """Install the hooks."""
        stack = self._stack
        before, after = map(uncompiled, (self._before_step, self._after_step))
        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        if (this_process().world or 1) > 1:
            gradient = uncompiled(self._gradient)
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    hooked: Any = parameter
                    handle = hooked.register_post_accumulate_grad_hook(gradient)
                    stack.callback(handle.remove)
        self._traffic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Remove the hooks and close the sinks."""
        self._stack.close()
        for sink in self._sinks:
            close: Callable[[], None] | None = getattr(sink, "close", None)
            if close is not None:
                close()

    def close(self) -> None:
        """End the monitor outside a `with` statement."""
        self.__exit__()

    def _gradient(self, _: Any) -> None:
        self._last_gradient = time.perf_counter()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._trains(optimizer):
            return
        if self._depth == 0:
            self._waiting = time.perf_counter() - self._last_gradient
        self._depth += 1

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._trains(optimizer):
            return
        self._depth -= 1
        if self._depth:
            return
        now = time.perf_counter()
        self.step += 1
        metrics = {
            "step_s": now - self._ended,
            "predicted_s": self._predicted(),
            "waiting_s": self._waiting,
            **self._traffic(),
            "monitor_s": self._overhead,
        }
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        statistics = self._every and self.step % self._every == 0 and now >= self._statistics_due
        if statistics:
            metrics |= weight_statistics(self._model)
        for sink in self._sinks:
            sink(self.step, metrics)
        self._last_gradient = math.nan
        self._ended = time.perf_counter()
        self._overhead = self._ended - now
        if statistics:
            self._statistics_due = self._ended + self._pause * self._overhead

    def _trains(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(p) in self._parameters for group in groups for p in group["params"])

    def _predicted(self) -> float:
        """Return the predicted seconds in the notes of the active plan; NaN without them."""
        if self._switches != (switches := switch_count()):
            plans = (options.plan for options in options_of(self._model))
            texts = [plan.notes["seconds"] for plan in plans if plan and "seconds" in plan.notes]
            self._prediction = float(texts[0]) if texts else math.nan
            self._switches = switches
        return self._prediction

    def _traffic(self) -> dict[str, float]:
        """Return the bytes and codec seconds since the last call."""
        if self._compression is None:
            return {}
        report = self._compression.report()
        tallies = [report.tally]
        if isinstance(report, DuoReport):
            tallies += [report.slow, *([report.parameters] if report.parameters else [])]
        sent = sum(tally.wire + tally.inside for tally in tallies)
        coding = sum(tally.coding for tally in tallies)
        result = {"sent_bytes": float(sent - self._sent), "codec_s": coding - self._coding}
        self._sent, self._coding = sent, coding
        return result
