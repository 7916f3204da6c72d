"""Sensitivity estimation: `sensitivity` by one method, `several` by more on the same steps.

It stops early once the result is `settled`, which depends only on the results so far.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_fx.devices.format_support import support
from qsync_fx.diagnostics.model_state import copies, copy_back, restored
from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS, Precision, precisions
from qsync_fx.module_paths import unwrapped
from qsync_fx.options import Options
from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY, Sensitivity
from qsync_fx.profiler.sensitivity.checkpoint import SensitivityCheckpoint
from qsync_fx.profiler.sensitivity.gradient_step import (
    GradientNoise,
    GradientStep,
    Key,
    Method,
    gradients_of,
    method as method_called,
    of_gradients,
    samples,
    stepped,
    trained,
)
from qsync_fx.profiler.tensor_capture.graph_capture import Captured, as_it_is
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite, changes
from qsync_fx.profiler.timing.step_timers import StepFunction, check_batches, check_model, checking
from qsync_fx.progress import progress as shown_progress
from qsync_fx.rounding import rounding_stream
from qsync_fx.serialization.schema import Path

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

STEPS, FRACTION = 50, 0.5
"""Default number of batches, and fraction of each batch that is used, as in QSync."""
LEAST: Final = 4
"""Minimum number of steps to estimate their variation."""
SHARE: Final = 0.2
"""Share of a precision's sum below which an operator's error tolerance stops shrinking."""


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
    path: Path | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Estimate each operator's contribution to the gradient variance in each precision.

    Args:
        model: the model to train. Its state and the random number generators are restored.
        step: `step(model, batch)` returns the loss; it calls the model through its first argument.
        batches: a list repeats if it is shorter than `steps`; an iterator ends the steps.
        method: name of a method, of `gradient_step.methods`.
        precisions: by default those below 32 bits that the device computes natively.
        fraction: fraction of each batch that is used.
        optimizer: makes the optimizer that trains the model between the steps, such as `lambda p:
            torch.optim.SGD(p, lr=0.1)`; by default all steps use the same parameters.
        options: options of the backend, for rounding and scaling.
        path: output file. Intermediate results are stored after each step in a file next to it that
            ends in ".partial"; a call with the same weights and batches resumes from it.
        progress: whether to show progress on standard error.

    Raises:
        ProfileError: the loss depends on no parameter, Dynamo compiles no part of the model, there
            is no batch, `path` has an interrupted run of something else, or it is not writable.
    """
    partial = None
    if path is not None:
        SENSITIVITY.check_writable(path)
        partial = pathlib.Path(f"{path}.partial")
    settings = (precisions, steps, fraction, optimizer, options, seed, partial)
    (result,) = several(model, step, batches, [method], *settings, progress=progress)
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
    partial: Path | None = None,
    within: float = 0.0,
    progress: bool = True,
) -> list[Sensitivity]:
    """Estimate the sensitivity by several methods on the same steps; see `sensitivity`.

    Args:
        partial: file of intermediate results.
        within: tolerance at which to stop early, once all methods have `settled`; 0 for all steps.
        progress: whether to show progress on standard error.
    """
    check_model(model)
    check_batches(batches)
    specs = {name: method_called(name) for name in methods}
    root = unwrapped(model)
    _check(root, fraction)
    names = _formats(precisions, root)
    captured = Captured(root, Options.parse(options))
    name = type(root).__name__
    about = f"{name} in {', '.join(names)}, {steps} steps of {fraction} of a batch, seed {seed}"
    if non_default := captured.options.non_default_options:
        about += f", {non_default}"
    if optimizer is not None:
        about += ", trained between"
    made = {method: spec.make() for method, spec in specs.items()}
    checkpoint = SensitivityCheckpoint(partial, made, about, root)
    with contextlib.ExitStack() as stack:
        if any(spec.twice for spec in specs.values()):
            # From the first pass, as Dynamo would capture the model again for another kernel.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(restored(root))
        stack.enter_context(torch.enable_grad())
        bar = shown_progress(f"sensitivity of {name}", steps, progress)
        advance = stack.enter_context(bar)
        run = _SensitivityRun(captured, step, names, seed)
        noise = GradientNoise()
        trainer = optimizer and optimizer(list(trained(root).values()))
        for index, batch in enumerate(stepped(batches, steps, fraction)):
            if index == 0:
                checkpoint.resume(batch)
            is_new = index >= checkpoint.steps
            traces = checkpoint.traces.values()
            if within and is_new and all(settled(trace, within) for trace in traces):
                break
            with run.at(index, batch) as now:
                if index == 0 and progress and sys.stderr.isatty():
                    operators = len({operator for operator, _ in now().keys})
                    most = f"{steps - checkpoint.steps} steps"
                    if within:
                        most = f"at most {most}"
                    scope = f"{operators} operators in {', '.join(names)}"
                    for method, spec in specs.items():
                        passes = spec.passes(operators, len(names))
                        text = f"{method}: {most} of about {passes} passes, {scope}"
                        print(text, file=sys.stderr)
                if is_new:
                    for method in methods:
                        begin = time.perf_counter()
                        values = run.settled(made[method], now)
                        checkpoint.add(method, values, time.perf_counter() - begin)
                    checkpoint.save()
                else:
                    run.through(now)
                if not (isinstance(batches, Sequence) and len(batches) == 1):
                    exact = now()
                    noise.add(exact.gradients(), exact.samples)
                if trainer is not None:
                    _train(trainer, now())
            advance(f"step {index + 1}", checkpoint.seconds_left(steps, index + 1))
    return [
        replace(
            run.result(method, checkpoint.traces[method], checkpoint.seconds[method]),
            noise=noise.value(fraction),
            noise_scale=noise.scale(),
        )
        for method in methods
    ]


class _SensitivityRun:
    """Rounding sites of a model's operators in all graphs so far; new shapes add graphs."""

    def __init__(
        self, captured: Captured, step: StepFunction, names: Sequence[str], seed: int
    ) -> None:
        self.captured, self.step, self.names, self.seed = captured, step, tuple(names), seed
        self.changes: dict[str, dict[str, RoundingSite]] = {}
        self.coding: Mapping[str, Mapping[str, float]] = {}
        self._graph_count = 0

    @contextlib.contextmanager
    def at(self, index: int, batch: Any) -> Iterator[Callable[[], GradientStep]]:
        """Yield a function that makes the step of a batch, with equal random state each time."""
        digest = hashlib.blake2b(f"{self.seed} {index}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        step = checking(self.step, self.captured.model, f"step {index + 1}")
        loss = functools.partial(step, self.captured.call, batch)
        buffers = copies(self.captured.model.buffers())

        def again(sample: int) -> None:
            copy_back(buffers)
            torch.manual_seed(seed)
            rounding_stream.load_state_dict({"seed": seed, "draws": sample << 20})

        def now() -> GradientStep:
            if not self._graph_count:
                again(0)
                with self.captured.running(as_it_is):
                    exact = gradients_of(loss(), self.captured.model)
                self.learn()
                self.coding = of_gradients(exact)
            generator = torch.Generator().manual_seed(seed)
            count = samples(batch)
            return GradientStep(self.captured, loss, again, self.changes, generator, count)

        yield now

    def through(self, now: Callable[[], GradientStep]) -> None:
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
        new = self.captured.graphs[self._graph_count :]
        for part in new:
            for operator, by in changes(part, self.names, self.captured.options).items():
                self.changes.setdefault(operator, by)
        self._graph_count += len(new)
        return bool(new)

    def result(
        self, method: str, steps: Sequence[Mapping[Key, float]], seconds: float
    ) -> Sensitivity:
        order = [str(operator.id) for operator in self.captured.operators]
        keys = {op: self.changes[op].keys() for op in order if op in self.changes}
        trace = [
            {op: {name: values.get((op, name), 0.0) for name in by} for op, by in keys.items()}
            for values in steps
        ]
        mean = {
            op: {name: sum(values[op][name] for values in trace) / len(trace) for name in by}
            for op, by in keys.items()
        }
        model = type(self.captured.model).__name__
        return Sensitivity(method, model, mean, len(trace), trace, seconds, self.coding)


def _check(model: nn.Module, fraction: float) -> None:
    if not 0 < fraction <= 1:
        message = f"a fraction of {fraction} is no part of a batch"
        raise ProfileError(message, do="give a number above 0, at most 1")
    if not trained(model):
        message = f"{type(model).__name__} has no parameter that requires a gradient"
        raise ProfileError(message, do="give the model in training")


def _formats(value: Sequence[str | Precision] | None, model: nn.Module) -> list[str]:
    if value is not None:
        return [fmt.name for fmt in precisions(value)]
    device = next(model.parameters()).device
    return [f.name for f in FORMATS.values() if f.bits < 32 and support(device, f).kind == "native"]


def _train(optimizer: torch.optim.Optimizer, step: GradientStep) -> None:
    result = step.gradients()
    for name, parameter in trained(step.captured.model).items():
        parameter.grad = result.get(name)
    optimizer.step()


def settled(trace: Sequence[Mapping[Key, float]], within: float) -> bool:
    """Return whether the mean over steps is known for each operator and precision.

    A plan compares operators, so the tolerance is on their ratio to the sum over all operators.
    Variation that is common to all operators does not matter; the sum needs only half the accuracy.
    The tolerance of the standard error is relative to the larger of the operator's mean and `SHARE`
    of its precision's sum.
    """
    if len(trace) < LEAST:
        return False
    # Operators of graphs that appear in a later step contribute 0 in the earlier steps.
    result = {key: [step.get(key, 0.0) for step in trace] for key in set().union(*trace)}
    sums: dict[str, list[float]] = {}
    for (_, precision), values in result.items():
        total = sums.setdefault(precision, [0.0] * len(trace))
        sums[precision] = [a + b for a, b in zip(total, values, strict=True)]
    for values in sums.values():
        if _error(values) > 2 * within * statistics.fmean(values):
            return False
    for (_, precision), values in result.items():
        mean, full = statistics.fmean(values), statistics.fmean(sums[precision])
        # The step's sum predicts the operator's value in the step.
        share = mean / full if full else 0.0
        pairs = zip(values, sums[precision], strict=True)
        left = [value - share * total for value, total in pairs]
        if _error(left) > within * max(mean, SHARE * full):
            return False
    return True


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
