"""Sensitivity estimation: `sensitivity` by one method, `several` by more on the same steps.

Estimation stops early once the result is `settled`. This depends only on the results so far, so an
interrupted run that resumes ends at the same step. The model's parameters, gradients, buffers and
training modes, and the random number generators, are restored even after an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_fx.devices.format_support import support
from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS, Precision, precisions
from qsync_fx.module_paths import unwrapped
from qsync_fx.options import Options
from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY, Sensitivity
from qsync_fx.profiler.sensitivity.checkpoint import INTERRUPTED, SensitivityCheckpoint
from qsync_fx.profiler.sensitivity.gradient_step import (
    GradientStep,
    Key,
    Method,
    gradients_of,
    of_gradients,
    samples,
    stepped,
)
from qsync_fx.profiler.sensitivity.indicator_registry import method as method_called
from qsync_fx.profiler.tensor_capture.graph_capture import Captured, as_it_is
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite, changes
from qsync_fx.profiler.timing.step_timers import StepFunction, check_batches, checked_loss, finite
from qsync_fx.profiler.timing.step_validation import left_to_us
from qsync_fx.profiler.training_state import repeatable, trained, undisturbed
from qsync_fx.progress import progress
from qsync_fx.serialization.schema import Path

LEAST: Final = 4
"""Minimum number of steps for an estimate of the variation between steps."""
SHARE: Final = 0.2
"""Share of a precision's sum below which an operator's error tolerance stops shrinking."""


def settled(trace: Sequence[Mapping[Key, float]], within: float) -> bool:
    """Return whether the mean over steps is known for each operator and precision.

    A plan compares operators, so the tolerance is on their ratio to the sum over all operators.
    Variation that is common to all operators, such as a batch with a larger loss, does not matter;
    the sum itself needs only half the accuracy.

    Args:
        trace: for each step, the variance that each operator adds in each precision.
        within: tolerance of the standard error, relative to the larger of the operator's mean and
            `SHARE` of its precision's sum.
    """
    if len(trace) < LEAST:
        return False
    # Operators of graphs that appear in a later step contribute 0 in the earlier steps.
    result = {key: [step.get(key, 0.0) for step in trace] for key in set().union(*trace)}
    sums: dict[str, list[float]] = {}
    for (_, precision), values in result.items():
        sums[precision] = [
            a + b for a, b in zip(sums.get(precision, [0.0] * len(trace)), values, strict=True)
        ]
    full = {precision: statistics.fmean(values) for precision, values in sums.items()}
    if not all(
        _error(values) <= 2 * within * full[precision] for precision, values in sums.items()
    ):
        return False
    for (_, precision), values in result.items():
        mean, neighbours = statistics.fmean(values), sums[precision]
        # The step's sum predicts the operator's value in the step.
        share = mean / full[precision] if full[precision] else 0.0
        left = [value - share * total for value, total in zip(values, neighbours, strict=True)]
        if _error(left) > within * max(mean, SHARE * full[precision]):
            return False
    return True


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


Say = Callable[[str], None]
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

STEPS, FRACTION = 50, 0.5
"""Default number of batches, and fraction of each batch that is used, as in QSync."""


def sensitivity(
    model: nn.Module,
    step: StepFunction,
    batches: Iterable[Any],
    method: str = "second_order",
    precisions: Sequence[str | Precision] | None = None,
    steps: int = STEPS,
    fraction: float = FRACTION,
    optimizer: Optimizer | None = None,
    options: dict[str, object] | Options | None = None,
    seed: int = 0,
    say: Say | None = None,
    path: Path | None = None,
) -> Sensitivity:
    """Estimate each operator's contribution to the gradient variance in each precision.

    Args:
        model: the model to train; it is restored.
        step: `step(model, batch)` returns the loss; it calls the model through its first argument.
        batches: a list repeats if it is shorter than `steps`; an iterator ends the steps.
        method: name of a method, of `indicator_registry.methods`.
        precisions: by default those below 32 bits that the device computes natively.
        steps: number of batches in the mean.
        fraction: fraction of each batch that is used.
        optimizer: makes the optimizer that trains the model between the steps, such as `lambda p:
            torch.optim.SGD(p, lr=0.1)`; by default all steps use the same parameters. Parameters
            are restored at the end.
        options: options of the backend, for rounding and scaling.
        seed: seed of all random draws.
        say: callback for cost and progress messages; by default they go to standard error, as a bar
            on a terminal, else as occasional lines.
        path: output file. Intermediate results are stored after each step in a file next to it that
            ends in ".partial"; a call with the same weights and batches resumes from it.

    Raises:
        ProfileError: the loss depends on no parameter, Dynamo compiles no part of the model, there
            is no batch, `path` has an interrupted run of something else, or it is not writable.
    """
    if path is not None:
        SENSITIVITY.check_writable(path)
    partial = None if path is None else pathlib.Path(f"{path}.partial")
    (result,) = several(
        model,
        step,
        batches,
        [method],
        precisions,
        steps,
        fraction,
        optimizer,
        options,
        seed,
        say,
        partial,
    )
    if path is not None and partial is not None:
        result.save(path)
        partial.unlink(missing_ok=True)
    return result


def several(
    model: nn.Module,
    step: StepFunction,
    batches: Iterable[Any],
    methods: Sequence[str],
    precisions: Sequence[str | Precision] | None = None,
    steps: int = STEPS,
    fraction: float = FRACTION,
    optimizer: Optimizer | None = None,
    options: dict[str, object] | Options | None = None,
    seed: int = 0,
    say: Say | None = None,
    partial: Path | None = None,
    within: float = 0.0,
    shown: bool = True,
) -> list[Sensitivity]:
    """Estimate the sensitivity by several methods on the same steps; see `sensitivity`.

    Args:
        partial: file of intermediate results.
        within: tolerance at which to stop early, once all methods have `settled`; 0 to run all
            steps.
        shown: whether to show progress on standard error if `say` is None.
    """
    check_batches(batches)
    available = {name: method_called(name) for name in methods}
    made: dict[str, Method] = {name: entry.make() for name, entry in available.items()}
    root = unwrapped(model)
    _check(root, fraction)
    names = _names(precisions, root)
    captured = Captured(root, Options.parse(options))
    about = f"{type(root).__name__} in {', '.join(names)}, {steps} steps of {fraction} of a batch, seed {seed}"
    about = ", ".join(
        filter(
            None,
            (
                about,
                captured.options.non_default_options,
                "" if optimizer is None else "trained between",
            ),
        )
    )
    if partial is not None:
        INTERRUPTED.check_writable(partial)
    saved = SensitivityCheckpoint(partial, made, about, root)
    # From the first pass, as Dynamo would capture the model again for another attention kernel.
    attention = (
        sdpa_kernel(SDPBackend.MATH)
        if any(entry.twice for entry in available.values())
        else contextlib.nullcontext()
    )
    tell: Say = say or (_on_a_terminal if shown else lambda _: None)
    bar = progress(f"sensitivity of {type(root).__name__}", steps, shown and say is None)
    with undisturbed(root), attention, bar as done:
        looking = _SensitivityRun(captured, step, names, seed)
        trainer = optimizer(list(trained(root).values())) if optimizer is not None else None
        for index, batch in enumerate(stepped(batches, steps, fraction)):
            if index == 0:
                saved.resume(batch)
            if (
                within
                and index >= saved.steps
                and all(settled(trace, within) for trace in saved.traces.values())
            ):
                break
            with looking.at(index, batch) as now:
                if index == 0:
                    many = len({name for name, _ in now().keys})
                    for name, entry in available.items():
                        passes = entry.passes(many, len(names))
                        most = f"{'at most ' if within else ''}{steps - saved.steps} steps"
                        cost = f"{name}: {most} of about {passes} passes, {many} operators in {', '.join(names)}"
                        tell(cost)
                if index < saved.steps:
                    looking.through(now)
                else:
                    saved.add(
                        {
                            name: _timed(lambda name=name: looking.settled(made[name], now))  # type: ignore[misc]
                            for name in methods
                        }
                    )
                if trainer is not None:
                    _train(trainer, now())
            left = saved.seconds_left(steps, index + 1)
            done(f"step {index + 1}", left)
            if say is not None:
                say(f"step {index + 1} of {steps}, about {left:.0f} s left")
    order = [str(operator.id) for operator in captured.operators]
    return [
        _value(
            name,
            root,
            order,
            looking.changes,
            saved.traces[name],
            saved.seconds[name],
            looking.coding,
        )
        for name in methods
    ]


def _timed(look: Callable[[], dict[Key, float]]) -> tuple[dict[Key, float], float]:
    begin = time.perf_counter()
    return look(), time.perf_counter() - begin


def _on_a_terminal(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


class _SensitivityRun:
    """Rounding sites of a model's operators in all graphs so far; new shapes add graphs.

    Attributes:
        changes: rounding sites by operator and precision.
        coding: gradient variance of codecs by parameter, from the first pass, even in a resumed
            run.
    """

    def __init__(
        self, captured: Captured, step: StepFunction, names: Sequence[str], seed: int
    ) -> None:
        self.captured, self.step, self.names, self.seed = captured, step, tuple(names), seed
        self.changes: dict[str, dict[str, RoundingSite]] = {}
        self.coding: Mapping[str, Mapping[str, float]] = {}
        self._known = 0

    @contextlib.contextmanager
    def at(self, index: int, batch: Any) -> Iterator[Callable[[], GradientStep]]:
        """Yield a function that makes the step of a batch, with the same random state each time."""
        seed = int.from_bytes(
            hashlib.blake2b(f"{self.seed} {index}".encode(), digest_size=4).digest(), "little"
        )

        def loss() -> Tensor:
            return _checked(self.step(self.captured.call, batch), index)

        with repeatable(self.captured.model, seed) as again:

            def now() -> GradientStep:
                if not self._known:
                    again(0)
                    with self.captured.running(as_it_is), left_to_us(f"step {index + 1}"):
                        exact = gradients_of(loss(), self.captured.model)
                    self.learn()
                    self.coding = of_gradients(exact)
                generator = torch.Generator().manual_seed(seed)
                return GradientStep(
                    self.captured, loss, again, self.changes, generator, samples(batch)
                )

            yield now

    def through(self, now: Callable[[], GradientStep]) -> None:
        """Run a step only to capture its graphs."""
        step = now()
        step.again(0)
        with self.captured.running(as_it_is):
            step.loss()
        self.learn()

    def settled(self, method: Method, now: Callable[[], GradientStep]) -> dict[Key, float]:
        """Return a method's result for a step, repeated until no graph is new."""
        step = now()
        while True:
            result = method.look(step)
            if not self.learn():
                return result
            step = now()

    def learn(self) -> bool:
        """Add the rounding sites of new graphs; return whether there are any."""
        self.captured.require()
        new = self.captured.graphs[self._known :]
        for part in new:
            for operator, by in changes(part, self.names, self.captured.options).items():
                self.changes.setdefault(operator, by)
        self._known += len(new)
        return bool(new)


def _check(model: nn.Module, fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ProfileError(
            f"a fraction of {fraction} is no part of a batch", do="give a number above 0, at most 1"
        )
    if not trained(model):
        message = f"{type(model).__name__} has no parameter that requires a gradient"
        raise ProfileError(message, do="measure what is to be trained")


def _names(value: Sequence[str | Precision] | None, model: nn.Module) -> list[str]:
    if value is not None:
        return [fmt.name for fmt in precisions(value)]
    device = next(model.parameters()).device
    return [f.name for f in FORMATS.values() if f.bits < 32 and support(device, f).how == "native"]


def _checked(value: object, index: int) -> Tensor:
    where = f"step {index + 1}"
    return finite(checked_loss(value, where), where)


def _train(optimizer: torch.optim.Optimizer, step: GradientStep) -> None:
    result = step.gradients()
    for name, parameter in trained(step.captured.model).items():
        parameter.grad = result.get(name)
    optimizer.step()


def _value(
    name: str,
    model: nn.Module,
    order: Sequence[str],
    made: dict[str, dict[str, RoundingSite]],
    steps: Sequence[dict[Key, float]],
    seconds: float,
    coding: Mapping[str, Mapping[str, float]],
) -> Sensitivity:
    trace = [
        {op: {p: item.get((op, p), 0.0) for p in made[op]} for op in order if op in made}
        for item in steps
    ]
    mean = {
        op: {p: sum(values[op][p] for values in trace) / len(trace) for p in made[op]}
        for op in order
        if op in made
    }
    return Sensitivity(name, type(model).__name__, mean, len(trace), trace, seconds, coding)
