"""Measurement of a model's profile: `measure`.

Every plan is compiled once; then all plans run interleaved in one process, so that other load
affects all of them. In each round a plan runs `_TURN` steps: one to warm up memory and caches, one
that is timed as a unit, and one that is timed line by line. Completed rounds are checkpointed and
survive an interruption.

With an existing profile, only further plans are measured. Its first plan runs interleaved with
them, and their times are scaled to the speed that the machine had when the profile was measured.

Invariant: the model, its optimizer and the random number generators are restored.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.devices.format_support import support
from qsync_fx.devices.machine import Machine, this_machine
from qsync_fx.diagnostics.explanation import Explanation
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.formats import FORMATS, Precision, encoding, precision, precisions as named
from qsync_fx.module_paths import unwrapped
from qsync_fx.options import Options
from qsync_fx.plan.cluster_plan import HoldsPlan, device_plans
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.profiler.links.collective_times import ranks
from qsync_fx.profiler.links.joint_steps import planned_seconds
from qsync_fx.profiler.links.link_measurement import PLANS, coding_speeds, linked
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.observed_step import ObservedStep, States, add, observed, profile_plans
from qsync_fx.profiler.profile import PROFILE, Collective, Model, Profile
from qsync_fx.profiler.run_statistics import MeasuredRun, levelled
from qsync_fx.profiler.samples import SAMPLES, Samples, StepSample, resumed, run_of
from qsync_fx.profiler.sensitivity.estimate import FRACTION, LEAST, STEPS, several as sensitivities
from qsync_fx.profiler.sensitivity.indicator_registry import method
from qsync_fx.profiler.timing.attribution import attribute
from qsync_fx.profiler.timing.inductor_lines import Files, WatchedLowering, watching
from qsync_fx.profiler.timing.measured_memory import known_memory, measured_peak
from qsync_fx.profiler.timing.step_timers import (
    GpuTimer,
    StepFunction,
    TrainingStep,
    clock_for,
    clock_of,
    first_batch,
    timing_kernels,
    timing_lines,
)
from qsync_fx.profiler.timing.step_validation import Compiled, CompileUnder, compiling
from qsync_fx.profiler.training_state import untouched
from qsync_fx.progress import Advance, progress as shown_progress
from qsync_fx.serialization.schema import Path

_TURN: Final = 3
"""Steps of a plan in one round."""
_KNOWN: Final = (1.0, 0.015)
"""Seconds to compile a model, fixed and per operator, if its graphs are in torch's caches."""
_NEW: Final = (5.0, 0.2)
"""The same without cached graphs; most of it is the C++ compiler, for distinct kernels.

Measured on two cores: 45 s for BERT-base (302 operators), 40 s of CPU time for ResNet-18 (69).
"""


def costs(observed: ObservedStep, plans: int, rounds: int) -> str:
    """Return the estimated cost of measuring a model under `plans` plans in `rounds` rounds."""
    from qsync_fx.formatting import many

    steps = plans * (rounds * _TURN + 3)
    message = f"measuring {observed.model.name} under {many(plans, 'plan')}: {many(plans, 'compilation')} and {steps} steps"
    return f"{message}, {_about(observed, plans, steps * _step(observed))}"


def sensitivity_costs(observed: ObservedStep, sensitivity: str | None, formats: int) -> str:
    """Return the estimated cost of measuring the sensitivity; "" without one."""
    if sensitivity is None:
        return ""
    from qsync_fx.formatting import many, roughly

    passes = method(sensitivity).passes(len(observed.explanation.plan().operators), formats)
    least, most = (
        roughly(steps * FRACTION * passes * observed.seconds.passes) for steps in (LEAST, STEPS)
    )
    steps = (
        f"{LEAST} to {STEPS} steps of about {many(passes, 'pass', 'passes')} for its sensitivity"
    )
    return f"; then {steps}, {least} to {most}, until it is known well enough"


def sending_costs(observed: ObservedStep, ranks: int) -> str:
    """Return the estimated cost of measuring joint steps of all ranks; "" for a single rank."""
    if ranks == 1:
        return ""
    steps = PLANS * planned_seconds(_step(observed))
    return f"; then steps of all {ranks} ranks together under {PLANS} plans, {_about(observed, PLANS, steps)}"


class Left:
    """Estimate of the remaining time of a measurement, from the durations of its completed parts.

    Args:
        observed: the model.
        plans: number of plans to compile.
        rounds: number of rounds per plan.

    Attributes:
        compiled: seconds of each completed compilation; the caller appends.
        turned: seconds of each plan in each completed round; the caller appends.
    """

    def __init__(self, observed: ObservedStep, plans: int, rounds: int) -> None:
        self._plans, self._turns, self._turn = plans, plans * rounds, _TURN * _step(observed)
        self.compiled: list[float] = []
        self.turned: list[float] = []

    @property
    def seconds(self) -> float:
        """Remaining seconds; the mean omits the first compilation, which starts compilers."""
        each = _mean(self.compiled[1:] or self.compiled, 0.0)
        turns = (self._turns - len(self.turned)) * _mean(self.turned, self._turn)
        return (self._plans - len(self.compiled)) * each + turns


def _mean(seconds: Sequence[float], unknown: float) -> float:
    return statistics.fmean(seconds) if seconds else unknown


def _about(observed: ObservedStep, plans: int, steps: float) -> str:
    """Return in words the time to compile under `plans` plans, plus `steps` seconds of steps."""
    from qsync_fx.formatting import roughly

    operators = len(observed.explanation.operators)
    available, new = (
        roughly(plans * (fixed + each * operators) + steps) for fixed, each in (_KNOWN, _NEW)
    )
    return f"about {available} where torch's caches hold what is compiled, {new} where not"


def _step(observed: ObservedStep) -> float:
    return observed.seconds.passes + observed.seconds.optimizer


GivenOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer]
"""An optimizer of the model, or a function that makes one from its parameters."""

_ONE: Final = "optimizer=torch.optim.SGD(model.parameters(), lr=0.1)"


def checked(model: nn.Module, rounds: int, options: Mapping[str, object]) -> nn.Module:
    """Return the module to measure, without its wrappers.

    Raises:
        OptionError: the model is no module, or `rounds` or an option is invalid.
        ProfileError: the parameters are not all on the CPU, or not all on one GPU.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"measure takes a module, not {type(model).__name__}",
            do="give the model that is trained",
        )
    if rounds < 1:
        raise OptionError(
            f"a plan cannot be measured {rounds} times", where="repeats", do="give 1 or more"
        )
    inputs = Options.parse(options)
    if inputs.skip_unprofitable:
        raise OptionError(
            "operators are measured in every format, which is how it is found where which one is faster",
            where='option "skip_unprofitable"',
            do="leave the option out; a plan that is found from the profile keeps what is as fast in a wider format",
        )
    if (inner := inputs.inner_backend) != "inductor":
        raise OptionError(
            f"operators are timed in the code that Inductor writes, and {inner!r} writes none",
            where='option "inner_backend"',
            do="leave the option out",
        )
    module = unwrapped(model)
    devices = sorted({str(p.device) for p in module.parameters()})
    if len(devices) != 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ProfileError(
            "a model is measured on the CPU, or on one GPU",
            where=f"parameters on {', '.join(devices) or 'no device'}",
            do='move the model there, or take a device of the catalog: qsync_fx.devices.get("t4")',
        )
    return module


def optimizer_of(model: nn.Module, value: GivenOptimizer | None) -> Optimizer | None:
    """Return the given optimizer, or the one that the given function makes; None for none.

    Warns of parameters that are not the model's, as the predicted memory excludes them.

    Raises:
        OptionError: the result is no optimizer, or updates no parameter of the model.
    """
    if value is None:
        return None
    result: Any = value
    if callable(value) and not isinstance(value, Optimizer | nn.Module):
        result = value([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(result, Optimizer):
        message = f"what updates the model is a torch.optim.Optimizer, and not of type {type(result).__name__}"
        raise OptionError(
            message,
            where="optimizer",
            do=f"write {_ONE}, or give what makes one of a list of parameters",
        )
    name, owned = type(result).__name__, {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in result.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in updated if id(parameter) not in owned]
    if len(strange) == len(updated):
        message = (
            f"the optimizer, {name}, updates no parameter of the model, a {type(model).__name__}"
        )
        raise OptionError(
            message, where="optimizer", do=f"make it of this model's parameters: {_ONE}"
        )
    if strange:
        count = sum(parameter.numel() for parameter in strange)
        message = f"{len(strange)} of {len(updated)} parameters that {name} updates, {count} numbers, are not the model's"
        warnings.warn(f"{message}: what is foreseen of memory is without them", stacklevel=3)
    return result


_CHANCE: Final = 0.02
"""Minimum relative spread of steps, as few samples underestimate it."""
_OF_MEDIAN: Final = 1.86
"""Standard error of a median of n normal values, in median absolute deviations / sqrt(n)."""


def check_asked(plans: Sequence[Plan], precisions: object) -> None:
    """Raise `OptionError` if a correction has no plans, or requests other precisions."""
    if not plans:
        do = "give the plan that is to be measured, or leave the profile out to measure the model anew"
        raise OptionError("a profile is corrected by plans, and there is none", where="plan", do=do)
    if precisions is not None:
        do = "leave them out, or leave the profile out to measure the model anew"
        raise OptionError(
            "a profile that is corrected keeps its precisions", where="precisions", do=do
        )


def check_same(profile: Profile, machine: Machine, model: Model, optimizer: str) -> None:
    """Raise `ProfileError` if a profile's machine, model or optimizer is not the current one."""
    profile.machine.check(machine)
    profile.model.check(model)
    if profile.optimizer != optimizer:
        with_, now = (
            f"the optimizer {name}" if name else "no optimizer"
            for name in (profile.optimizer, optimizer)
        )
        raise ProfileError(
            f"it was taken with {with_}, and this is with {now}",
            where="optimizer",
            do="give the same",
        )


def corrected(profile: Profile, result: Profile) -> Profile:
    """Return a profile with the user plans of a new measurement, which replace equal ones.

    The new runs are scaled by the speed of the machine, which the run of the profile's first plan
    shows. If the profile has no memory of the loss, the new one is used.
    """
    then = profile.runs[0]
    neighbours = next(
        (run for run in result.runs if not run.planned or _states(run) == _states(then)), None
    )
    pace = 1.0 if neighbours is None else _pace(then, neighbours)
    runs = [run.at_pace(pace) for run in result.runs if run.planned]
    new = [_states(run) for run in runs]
    saved = [run for run in profile.runs if not (run.planned and _states(run) in new)]
    wider = set(result.graph.formats) - set(profile.graph.formats)
    loss = result.loss_memory if profile.loss_memory is None else profile.loss_memory
    return replace(
        profile,
        stored=result.stored if wider else profile.stored,
        runs=[*saved, *runs],
        loss_memory=loss,
    )


def again(
    profile: Profile, explanation: Explanation, requested: Mapping[str, Plan]
) -> dict[str, tuple[Plan, States]]:
    """Return the plans that correct a profile: the user's, and the profile's first plan."""
    result: dict[str, tuple[Plan, States]] = {}
    for label, plan in requested.items():
        add(result, label, plan, explanation)
    add(result, profile.runs[0].label, Plan.uniform(profile.precisions[0]), explanation)
    return result


def _pace(then: MeasuredRun, now: MeasuredRun) -> float:
    """Return the speed of the machine relative to the profile's; 1 within the standard error."""
    pace = then.passes / now.passes
    return pace if abs(pace - 1) > math.hypot(_uncertain(then), _uncertain(now)) else 1.0


def _uncertain(run: MeasuredRun) -> float:
    """Return the relative standard error of a run's median passes."""
    return _OF_MEDIAN * max(_CHANCE, run.spread) / math.sqrt(len(run.steps))


def _states(run: MeasuredRun) -> list[tuple[str, str | None, str | None]]:
    return [(measured.operator, measured.precision, measured.output) for measured in run.operators]


REPEATS = 7
SETTLED = 0.1
"""Tolerance of the sensitivity: the standard error of an operator's share of the gradient variance.

See `qsync_fx.profiler.sensitivity.estimate.settled`.
"""


def measure(
    model: nn.Module,
    step: StepFunction,
    batches: Iterable[Any],
    precisions: Sequence[str | Precision] | None = None,
    *,
    optimizer: GivenOptimizer | None = None,
    plan: Plan | HoldsPlan | Sequence[Plan | HoldsPlan] = (),
    profile: Profile | Path | None = None,
    repeats: int = REPEATS,
    sensitivity: str | None = "second_order",
    path: Path | None = None,
    options: Mapping[str, object] | None = None,
    all_reduce: bool | Callable[[], None] = True,
    progress: bool = True,
) -> Profile:
    """Measure a model on its device: operator times in each format, and the memory of a step.

    The estimated cost is printed to standard error first. The model is not trained.

    Args:
        model: a module, in the mode (train or eval) to measure.
        step: function of the model and a batch that returns the loss.
        batches: the first one is used for all timed steps.
        precisions: formats to measure; by default those that the device computes natively.
        optimizer: optimizer of the model, or a function that makes one from a list of its
            parameters; without it the profile covers the forward and backward pass only.
        plan: one or more plans, also as returned by find_plan, to measure themselves; this corrects
            their predictions.
        profile: an earlier profile of the same model on this machine, or its path. Then only `plan`
            is measured, interleaved with the profile's first plan to determine the current speed of
            the machine, and the corrected profile is returned. Its sensitivity and all-reduces are
            unchanged.
        repeats: number of rounds per plan.
        sensitivity: method that estimates each operator's contribution to the variance of the
            gradients (`qsync_fx.sensitivity`). It uses the first 50 batches, or fewer once the
            standard error is below 10%; a shorter list is repeated. None to omit it.
        path: file for the profile. Intermediate results are stored next to it, in files that end in
            ".partial", and an interrupted measurement resumes from them.
        options: options of the backend, for all plans.
        all_reduce: whether to measure all-reduces, and the cost of sending gradients during a step,
            if torch.distributed is initialized; this synchronizes all ranks. A function is called
            before, and returns when all ranks are ready.
        progress: whether to show progress.

    Raises:
        ProfileError: the step does not train the model, the profile or an interrupted measurement
            at `path` belongs to something else, or `path` is not writable.
        QSyncError: an option, a precision or the plan is invalid.
    """
    if path is not None:
        PROFILE.check_writable(path)
    if sensitivity is not None:
        method(sensitivity)
    module = checked(model, repeats, options or {})
    updating = optimizer_of(module, optimizer)
    first, batches = first_batch(batches)
    requested = device_plans(plan)
    base = _known(profile, requested, precisions)
    session = ProfilingSession(module, step, first, updating, options or {}, base, path, progress)
    formats = session.formats(precisions)
    if base is not None:
        measured = corrected(base, session.time_plans(formats, requested, repeats))
    else:
        measured = session.time_plans(formats, requested, repeats, sensitivity, bool(all_reduce))
        measured = replace(measured, codecs=coding_speeds(session.device))
        if sensitivity is not None:
            variances = session.measure_sensitivity(model, batches, sensitivity, formats)
            measured = replace(measured, sensitivity=variances)
        if all_reduce:
            if callable(all_reduce):
                all_reduce()
            measured = replace(measured, collectives=session.measure_links(measured))
    if path is not None:
        measured.save(path)
        session.discard_checkpoints()
    return measured


class ProfilingSession:
    """The stages of one measurement, in the order in which `measure` runs them.

    `time_plans` observes a step, compiles the model under every plan, and times the plans in
    interleaved rounds. For a new profile, `measure_sensitivity` and `measure_links` follow.

    Attributes:
        device: device of the module.
        training: the step on the first batch, with the optimizer and the clock of the device.
        base: profile to correct; None for a new profile.
    """

    def __init__(
        self,
        module: nn.Module,
        step: StepFunction,
        batch: Any,
        optimizer: Optimizer | None,
        options: Mapping[str, object],
        base: Profile | None,
        path: Path | None,
        progress: bool,
    ) -> None:
        self._module, self._step, self._optimizer = module, step, optimizer
        self._options, self._progress, self.base = options, progress, base
        self.device = next(module.parameters()).device
        self._machine = this_machine(self.device)
        self._gpu = GpuTimer(self.device) if self.device.type == "cuda" else None
        clock = clock_of(self.device) if self._gpu else clock_for(torch.get_num_threads())
        zero_grad = functools.partial(_zero, module, optimizer)
        self.training = TrainingStep(step, batch, optimizer, zero_grad, clock)
        self._samples_path = None if path is None else pathlib.Path(f"{path}.partial")
        self._sensitivity_path = (
            None if path is None else pathlib.Path(f"{path}.sensitivity.partial")
        )

    def formats(self, precisions: Sequence[str | Precision] | None) -> list[Precision]:
        """Return the formats to measure: of the base profile if there is one, else as requested."""
        if self.base is not None:
            return [precision(name) for name in self.base.graph.formats]
        return _formats(precisions, self.device)

    def time_plans(
        self,
        formats: Sequence[Precision],
        requested: Sequence[Plan],
        repeats: int,
        sensitivity: str | None = None,
        joint_steps: bool = False,
    ) -> Profile:
        """Return the profile of all plans, without sensitivity and links.

        Args:
            formats: formats of the profile.
            requested: plans of the user.
            repeats: rounds per plan, including those of an interrupted measurement.
            sensitivity: method of a later stage, whose cost is announced, too.
            joint_steps: whether a later stage measures steps of all ranks, likewise.
        """
        with untouched(self._module, self._optimizer), compiling() as compile_under:
            visited = observed(self._module, self.training, self._options)
            plans = self._plans(visited, formats, requested)
            samples = self._resumed_samples(visited, plans)
            rounds = max(0, repeats - samples.rounds)
            if self._progress:
                cost = costs(visited, len(plans), rounds)
                cost += sensitivity_costs(visited, sensitivity, len(formats))
                cost += sending_costs(visited, ranks() if joint_steps else 1)
                print(f"qsync: {cost}", file=sys.stderr, flush=True)
            with (
                watching(visited.model.digest) as files,
                shown_progress("measuring", len(plans) * (1 + rounds), self._progress) as advance,
            ):
                remaining = Left(visited, len(plans), rounds)
                compiled: dict[str, Compiled] = {}
                peaks: dict[str, int] = {}
                for label, (plan, _) in plans.items():
                    begin = time.perf_counter()
                    compiled[label], peaks[label] = self._compile(compile_under, plan, files)
                    remaining.compiled.append(time.perf_counter() - begin)
                    advance(f"compiled {label}", remaining.seconds)
                for _ in range(rounds):
                    self._run_round(compiled, samples, files, remaining, advance)
        profile = _profile(samples, visited, plans, formats, peaks)
        return replace(profile, optimizer_memory=known_memory(self._optimizer))

    def measure_sensitivity(
        self, model: nn.Module, batches: Any, name: str, formats: Sequence[Precision]
    ) -> Sensitivity:
        """Return the sensitivity by the method called `name`."""
        (result,) = sensitivities(
            model,
            self._step,
            batches,
            [name],
            formats,
            options=dict(self._options),
            partial=self._sensitivity_path,
            within=SETTLED,
            shown=self._progress,
        )
        return result

    def measure_links(self, profile: Profile) -> list[Collective]:
        """Return the times of all-reduces, alone and during steps; synchronizes all ranks."""
        with untouched(self._module, self._optimizer), compiling() as compile_under:

            def compile_plan(wrapped: nn.Module, passes: TrainingStep, plan: Plan) -> Compiled:
                return compile_under(wrapped, {**self._options, "plan": plan}, passes)

            return linked(profile, self._module, compile_plan, self.training)

    def discard_checkpoints(self) -> None:
        for path in (self._samples_path, self._sensitivity_path):
            if path is not None:
                path.unlink(missing_ok=True)

    def _plans(
        self, visited: ObservedStep, formats: Sequence[Precision], requested: Sequence[Plan]
    ) -> dict[str, tuple[Plan, States]]:
        if self.base is None:
            return _plans(visited, formats, requested)
        check_same(self.base, self._machine, visited.model, self._optimizer_name)
        return again(self.base, visited.explanation, _labelled(requested))

    @property
    def _optimizer_name(self) -> str:
        return type(self._optimizer).__name__ if self._optimizer is not None else ""

    def _resumed_samples(self, visited: ObservedStep, plans: Iterable[str]) -> Samples:
        """Return the samples of an interrupted measurement, or none for each plan."""
        empty: dict[str, list[StepSample]] = {label: [] for label in plans}
        samples = Samples(self._machine, visited.model, self._optimizer_name, empty)
        return samples if self._samples_path is None else resumed(self._samples_path, samples)

    def _compile(
        self, compile_under: CompileUnder, plan: Plan, files: WatchedLowering
    ) -> tuple[Compiled, int]:
        """Return the model compiled under a plan, and the peak memory of a step in bytes."""
        options = {**self._options, "plan": plan}
        compiled = compile_under(self._module, options, self.training)
        if files.unknown:
            with files.anew():
                compiled = compile_under(self._module, options, self.training)
        return compiled, measured_peak(functools.partial(self.training.run, compiled), self.device)

    def _run_round(
        self,
        compiled: Mapping[str, Compiled],
        samples: Samples,
        files: Files,
        remaining: Left,
        advance: Advance,
    ) -> None:
        """Time every plan once; only a complete round is added to the samples and saved."""
        complete: dict[str, StepSample] = {}
        for label, function in compiled.items():
            begin = time.perf_counter()
            complete[label] = _turn(function, self.training, files, self._gpu)
            remaining.turned.append(time.perf_counter() - begin)
            advance(label, remaining.seconds)
        for label, sample in complete.items():
            samples.plans[label].append(sample)
        if self._samples_path is not None:
            SAMPLES.write(self._samples_path, SAMPLES.encode(samples))


def _known(
    profile: Profile | Path | None, plans: Sequence[Plan], precisions: object
) -> Profile | None:
    """Return the profile to correct, loaded from its file if necessary; None for none."""
    if profile is None:
        return None
    check_asked(plans, precisions)
    return profile if isinstance(profile, Profile) else Profile.load(profile)


def _turn(
    compiled: Compiled, training: TrainingStep, files: Files, gpu: GpuTimer | None
) -> StepSample:
    training.run(compiled)
    full = training.run(compiled)
    if gpu is not None:
        # A single thread, so that the trace function also sees the backward pass.
        with timing_kernels(files, gpu) as queued, torch.autograd.set_multithreading_enabled(False):
            replace(training, clock=queued.clock).run(compiled, queued)
        result = attribute(queued.seconds(full), files)
        return StepSample(
            full.forward, full.backward, full.optimizer, dict(result.operators), result.quantized
        )
    with timing_lines(files, training.clock) as lines:
        watched = training.run(compiled, lines)
    # Tracing slows down the code between the lines, so times are scaled to the untraced step.
    scale = full.passes / watched.passes
    result = attribute({line: seconds * scale for line, seconds in lines.seconds.items()}, files)
    return StepSample(
        full.forward, full.backward, full.optimizer, dict(result.operators), result.quantized
    )


def _profile(
    samples: Samples,
    observed: ObservedStep,
    plans: Mapping[str, tuple[Plan, States]],
    formats: Sequence[Precision],
    peaks: Mapping[str, int],
) -> Profile:
    runs = [
        run_of(label, states, samples.plans[label], peaks[label], planned=label == label_of(plan))
        for label, (plan, states) in plans.items()
    ]
    return Profile(
        samples.machine,
        samples.model,
        stored(
            build_model_graph(
                observed.explanation, _asked([fmt.name for fmt in formats], plans.values())
            )
        ),
        [fmt.name for fmt in formats],
        levelled(runs),
        samples.optimizer,
        fingerprint=observed.fingerprint,
        loss_memory=observed.loss,
    )


def _asked(formats: list[str], plans: Iterable[tuple[Plan, States]]) -> list[str]:
    """Return the measured formats and the formats of the plans, without duplicates."""
    named = [
        fmt.name
        for plan, _ in plans
        for fmt in (
            plan.default,
            *plan.operators.values(),
            *(chosen for _, chosen in plan.patterns),
        )
        if fmt is not None
    ]
    return list(dict.fromkeys([*formats, *named]))


def _plans(
    observed: ObservedStep, formats: Sequence[Precision], requested: Sequence[Plan]
) -> dict[str, tuple[Plan, States]]:
    """Return the plans that every profile measures in these formats, and the user's plans."""
    result = profile_plans(observed.explanation, formats)
    for label, plan in _labelled(requested).items():
        add(result, label, plan, observed.explanation)
    return result


def _labelled(requested: Sequence[Plan]) -> dict[str, Plan]:
    return {label_of(plan): plan for plan in requested}


def label_of(plan: Plan) -> str:
    """Return the label of a user plan."""
    return f"plan {hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]}"


def _formats(precisions: Sequence[str | Precision] | None, device: torch.device) -> list[Precision]:
    if precisions is not None:
        result = named(precisions)
        if not result:
            raise OptionError(
                "no precision is to be measured", where="precisions", do="name one or more"
            )
        return result
    return [
        fmt
        for fmt in FORMATS.values()
        if fmt.bits <= 32 and encoding(fmt) is fmt and support(device, fmt).how == "native"
    ]


def _zero(module: nn.Module, optimizer: Optimizer | None) -> None:
    (module if optimizer is None else optimizer).zero_grad(set_to_none=True)
