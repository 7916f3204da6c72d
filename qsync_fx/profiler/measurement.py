"""Measurement of a model's profile: `measure`, in the stages of a `ProfilingSession`.

Every plan is compiled once. Then all plans run interleaved in one process, so that other load
affects all of them. A round of a plan has a warmup, a timed step, and one timed line by line.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.devices.format_support import support
from qsync_fx.devices.machine import this_machine
from qsync_fx.diagnostics.model_state import without_training
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.formats import FORMATS, Precision, encoding, precision, precisions as named
from qsync_fx.formatting import many, roughly
from qsync_fx.module_paths import unwrapped
from qsync_fx.options import Options
from qsync_fx.plan.cluster_plan import DevicePlan, device_plans
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.profiler.batch_interpolation import merge_batch_sizes
from qsync_fx.profiler.links.collective_times import ranks
from qsync_fx.profiler.links.joint_steps import planned_seconds
from qsync_fx.profiler.links.link_measurement import PLANS, coding_speeds, linked
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.observed_step import ObservedStep, States, add, observed, profile_plans
from qsync_fx.profiler.profile import (
    PROFILE,
    SAMPLES,
    Collective,
    Model,
    Profile,
    Samples,
    corrected,
    resumed,
)
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, levelled, merged
from qsync_fx.profiler.sensitivity.estimate import FRACTION, LEAST, STEPS, several as sensitivities
from qsync_fx.profiler.sensitivity.gradient_step import (
    method,
    samples as sample_count,
    sized,
)
from qsync_fx.profiler.timing.inductor_lines import Files, attribute, watching
from qsync_fx.profiler.timing.measured_memory import known_memory, measured_peak
from qsync_fx.profiler.timing.step_timers import (
    Compiled,
    CompileUnder,
    GpuTimer,
    StepFunction,
    TrainingStep,
    check_model,
    clock_for,
    clock_of,
    compiling,
    first_batch,
    timing_kernels,
    timing_lines,
)
from qsync_fx.progress import announced, progress as shown_progress
from qsync_fx.serialization.schema import Path

GivenOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer]

REPEATS: Final = 7
SETTLED: Final = 0.1
"""Tolerance of `settled`."""
_ROUND_STEPS: Final = 3


def measure(
    model: nn.Module,
    step: StepFunction,
    batches: Iterable[Any],
    precisions: Sequence[str | Precision] | None = None,
    *,
    optimizer: GivenOptimizer | None = None,
    plan: DevicePlan | Sequence[DevicePlan] = (),
    profile: Profile | Path | None = None,
    batch_sizes: Sequence[int] = (),
    repeats: int = REPEATS,
    sensitivity: str | None = "second_order",
    path: Path | None = None,
    options: Mapping[str, object] | None = None,
    all_reduce: bool | Callable[[], None] = True,
    progress: bool = True,
) -> Profile:
    """Measure a model on its device: operator times in each format, and the memory of a step.

    The estimated cost is printed to standard error first. The model is not trained: its state, its
    optimizer and the random number generators are restored.

    Args:
        model: a module, in the mode (train or eval) to measure.
        step: function of the model and a batch that returns the loss.
        batches: the first one is used for all timed steps.
        precisions: by default the formats that the device computes natively.
        optimizer: optimizer of the model, or a function that makes one from a list of its
            parameters; without it the profile covers the forward and backward pass only.
        plan: one or more plans, also as returned by find_plan, to measure themselves; this corrects
            their predictions.
        profile: an earlier profile of the same model on this machine, or its path. Then only `plan`
            is measured, interleaved with the profile's first plan to determine the current speed of
            the machine, and the corrected profile is returned.
        batch_sizes: numbers of samples in the first batch to measure with, two or three, so that
            plans may change the batch (`find_plan(..., batch="global")`). Samples are left out or
            repeated. The profile is for the first of them, and `Profile.at_batch` returns others.
            All plans are compiled and measured for each. Default: the samples of the first batch.
        repeats: number of rounds per plan. Fewer than the default also shorten the measurement of
            links.
        sensitivity: method of `qsync_fx.sensitivity`. It uses the first 50 batches, or fewer once
            the standard error is below 10%; a shorter list is repeated. None to omit it.
        path: file for the profile. Intermediate results are stored next to it, in files that end in
            ".partial", and an interrupted measurement resumes from them.
        options: options of the backend, for all plans.
        all_reduce: whether to measure all-reduces, and the cost of sending gradients during a step,
            if torch.distributed is initialized; this synchronizes all ranks. A function is called
            before, and returns when all ranks are ready.

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
    base = _loaded_base(profile, requested, precisions)
    if base is not None and batch_sizes:
        do = "leave batch_sizes out, or the profile"
        raise OptionError("a correction keeps the batch size", where="batch_sizes", do=do)
    sized_batches = sized(first, batch_sizes)

    def session_for(batch: Any, path: Path | None) -> ProfilingSession:
        return ProfilingSession(module, step, batch, updating, options or {}, base, path, progress)

    sessions = [session_for(sized_batches[0], path)]
    for batch in sized_batches[1:]:
        partial = None if path is None else f"{path}.{sample_count(batch)}"
        sessions.append(session_for(batch, partial))
    session = sessions[0]
    formats = session.formats(precisions)
    if base is not None:
        (measured,) = time_plans(sessions, formats, requested, repeats)
        measured = corrected(base, measured)
    else:
        profiles = time_plans(
            sessions, formats, requested, repeats, sensitivity, joint_steps=bool(all_reduce)
        )
        measured = merge_batch_sizes(profiles)
        measured = replace(measured, codecs=coding_speeds(session.device))
        if sensitivity is not None:
            variances = session.measure_sensitivity(model, batches, sensitivity, formats)
            variances = variances.at_batch(sample_count(first), sample_count(sized_batches[0]))
            measured = replace(measured, sensitivity=variances)
        if all_reduce:
            if callable(all_reduce):
                all_reduce()
            measured = replace(measured, collectives=session.measure_links(measured, repeats))
    if path is not None:
        measured.save(path)
        for item in sessions:
            item.discard_checkpoints()
    return measured


class ProfilingSession:
    """Stages of one measurement; with `base`, they correct that profile."""

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
        self.module, self._step, self.optimizer = module, step, optimizer
        self.options, self.progress, self.base = options, progress, base
        self.optimizer_name = optimizer_name(optimizer)
        self.samples_path = self._sensitivity_path = None
        if path is not None:
            self.samples_path = pathlib.Path(f"{path}.partial")
            self._sensitivity_path = pathlib.Path(f"{path}.sensitivity.partial")
        self.device = next(module.parameters()).device
        self._machine = this_machine(self.device)
        self.gpu, clock = None, clock_for(torch.get_num_threads())
        if self.device.type == "cuda":
            self.gpu, clock = GpuTimer(self.device), clock_of(self.device)
        zero_grad = functools.partial((optimizer or module).zero_grad, set_to_none=True)
        self.training = TrainingStep(step, batch, optimizer, zero_grad, clock)

    def formats(self, precisions: Sequence[str | Precision] | None) -> list[Precision]:
        """Return the formats to measure: from `base`, else as requested."""
        if self.base is not None:
            return [precision(name) for name in self.base.graph.formats]
        if precisions is None:
            wanted = [fmt for fmt in FORMATS.values() if fmt.bits <= 32 and encoding(fmt) is fmt]
            return [fmt for fmt in wanted if support(self.device, fmt).kind == "native"]
        return checked_precisions(precisions)

    def timed_plans(
        self, formats: Sequence[Precision], requested: Sequence[Plan], repeats: int
    ) -> TimedPlans:
        """Return the plans to time, with the results of an interrupted measurement."""
        with announced("capturing the graphs of the model", self.progress):
            visited = observed(self.module, self.training, self.options)
        plans = self._plans(visited, formats, requested)
        empty: dict[str, list[MeasuredRun]] = {label: [] for label in plans}
        samples = Samples(self._machine, visited.model, self.optimizer_name, empty)
        if self.samples_path is not None:
            samples = resumed(self.samples_path, samples)
        rounds = max(0, repeats - samples.rounds)
        return TimedPlans(self, visited, plans, samples, rounds)

    def measure_sensitivity(
        self, model: nn.Module, batches: Any, name: str, formats: Sequence[Precision]
    ) -> Sensitivity:
        (result,) = sensitivities(
            model,
            self._step,
            batches,
            [name],
            formats,
            options=dict(self.options),
            partial=self._sensitivity_path,
            within=SETTLED,
            progress=self.progress,
        )
        return result

    def measure_links(self, profile: Profile, repeats: int) -> list[Collective]:
        """Return the times of all-reduces, alone and during steps; synchronizes all ranks.

        Fewer `repeats` than the default shorten the measurement in proportion.
        """
        with (
            announced("measuring all-reduces and joint steps of all ranks", self.progress),
            without_training(self.module, self.optimizer),
            compiling() as compile_under,
        ):

            def compile_plan(wrapped: nn.Module, passes: TrainingStep, plan: Plan) -> Compiled:
                return compile_under(wrapped, {**self.options, "plan": plan}, passes)

            share = min(1.0, repeats / REPEATS)
            return linked(profile, self.module, compile_plan, self.training, share)

    def discard_checkpoints(self) -> None:
        for path in filter(None, (self.samples_path, self._sensitivity_path)):
            path.unlink(missing_ok=True)

    def _plans(
        self, visited: ObservedStep, formats: Sequence[Precision], requested: Sequence[Plan]
    ) -> dict[str, tuple[Plan, States]]:
        explanation = visited.explanation
        result: dict[str, tuple[Plan, States]] = {}
        if self.base is None:
            result = profile_plans(explanation, formats)
        else:
            self._check_base(self.base, visited.model)
        for plan in requested:
            add(result, label_of(plan), plan, explanation)
        if self.base is not None:
            first = Plan.uniform(self.base.precisions[0])
            add(result, self.base.runs[0].label, first, explanation)
        return result

    def _check_base(self, base: Profile, model: Model) -> None:
        base.machine.check(self._machine)
        base.model.check(model)
        if base.optimizer != self.optimizer_name:
            now = self.optimizer_name or "no optimizer"
            message = f"it was measured with {base.optimizer or 'no optimizer'}, not {now}"
            raise ProfileError(message, where="optimizer", do="give the same optimizer")


class TimedPlans:
    """Plans of a session that are compiled once and timed in rounds; see `time_plans`."""

    def __init__(
        self,
        session: ProfilingSession,
        visited: ObservedStep,
        plans: Mapping[str, tuple[Plan, States]],
        samples: Samples,
        rounds: int,
    ) -> None:
        self.visited, self.plans, self.rounds = visited, plans, rounds
        self._session, self._samples = session, samples
        self._compiled: dict[str, Compiled] = {}
        self._peaks: dict[str, int] = {}
        self._files: Files = {}

    def compile(self, compile_under: CompileUnder, advance: Callable[[str], None]) -> None:
        """Compile all plans, and measure their peak memory."""
        session = self._session
        with watching(self.visited.model.digest) as files:
            for label, (plan, _) in self.plans.items():
                options = {**session.options, "plan": plan}
                compiled = compile_under(session.module, options, session.training)
                if files.unknown:
                    with files.anew():
                        compiled = compile_under(session.module, options, session.training)
                step = functools.partial(session.training.run, compiled)
                self._compiled[label] = compiled
                self._peaks[label] = measured_peak(step, session.device)
                advance(label)
        self._files = files

    def run_round(self, advance: Callable[[str], None]) -> None:
        """Time every plan once; only complete rounds are added."""
        complete: list[MeasuredRun] = []
        for label, (_, states) in self.plans.items():
            complete.append(replace(self._run(self._compiled[label], states), label=label))
            advance(label)
        for run in complete:
            self._samples.plans[run.label].append(run)
        if self._session.samples_path is not None:
            SAMPLES.write(self._session.samples_path, SAMPLES.encode(self._samples))

    def profile(self, formats: Sequence[Precision]) -> Profile:
        """Return the profile of all plans and rounds."""
        session, samples, visited = self._session, self._samples, self.visited
        names = [fmt.name for fmt in formats]
        runs = []
        for label, (plan, _) in self.plans.items():
            run, planned = merged(samples.plans[label]), label == label_of(plan)
            runs.append(replace(run, peak_bytes=self._peaks[label], planned=planned))
        allowed = [*names, *(name for plan, _ in self.plans.values() for name in _formats_of(plan))]
        budget = Options.parse(session.options).active_memory_budget
        return Profile(
            samples.machine,
            samples.model,
            stored(build_model_graph(visited.explanation, allowed)),
            names,
            levelled(runs),
            samples.optimizer,
            optimizer_memory=known_memory(session.optimizer),
            fingerprint=visited.fingerprint,
            loss_memory=visited.loss,
            batch_size=sample_count(session.training.batch),
            memory_budget=1.0 if budget is None else budget,
        )

    def _run(self, compiled: Compiled, states: States) -> MeasuredRun:
        """Return the run of one step, with operator times of another one, scaled to it."""
        training, gpu = self._session.training, self._session.gpu
        training.run(compiled)
        full = training.run(compiled)
        if gpu is None:
            with timing_lines(self._files, training.clock) as lines:
                watched = training.run(compiled, lines)
            # Tracing slows down Python between the lines, so times are scaled to the first step.
            scale = full.passes / watched.passes
            seconds = {line: value * scale for line, value in lines.seconds.items()}
        else:
            # A single thread, so that the trace function also sees the backward pass.
            with (
                timing_kernels(self._files, gpu) as queued,
                torch.autograd.set_multithreading_enabled(False),
            ):
                replace(training, clock=queued.clock).run(compiled, queued)
            seconds = dict(queued.seconds(full))
        result = attribute(seconds, self._files)
        operators = [
            MeasuredOperator(operator, *state.names, *result.operators.get(operator, (0.0, 0.0)))
            for operator, state in states
        ]
        steps = [(full.forward, full.backward, full.optimizer)]
        return MeasuredRun("", steps, 0, operators, result.quantized)


def time_plans(
    sessions: Sequence[ProfilingSession],
    formats: Sequence[Precision],
    requested: Sequence[Plan],
    repeats: int,
    sensitivity: str | None = None,
    joint_steps: bool = False,
) -> list[Profile]:
    """Return the profile of each session, which differ in the batch size.

    Rounds of all sessions are interleaved. Later stages are for the estimated cost.
    """
    first = sessions[0]
    with without_training(first.module, first.optimizer), compiling() as compile_under:
        timed = [session.timed_plans(formats, requested, repeats) for session in sessions]
        if first.progress:
            visited = [item.visited for item in timed]
            cost = costs(visited, len(timed[0].plans), [item.rounds for item in timed])
            cost += sensitivity_costs(visited[0], sensitivity, len(formats))
            if joint_steps:
                cost += sending_costs(visited[0], ranks())
            print(f"qsync: {cost}", file=sys.stderr, flush=True)
        compilations = sum(len(item.plans) for item in timed)
        with shown_progress("compiling", compilations, first.progress) as advance:
            for item in timed:
                item.compile(compile_under, advance)
        steps = sum(item.rounds * len(item.plans) for item in timed)
        with shown_progress("measuring", steps, first.progress) as advance:
            for index in range(max(item.rounds for item in timed)):
                for item in timed:
                    if index < item.rounds:
                        item.run_round(advance)
    return [item.profile(formats) for item in timed]


def checked_precisions(precisions: Sequence[str | Precision]) -> list[Precision]:
    if result := named(precisions):
        return result
    raise OptionError("the list of precisions is empty", where="precisions", do="name one or more")


def optimizer_name(optimizer: Optimizer | None) -> str:
    return "" if optimizer is None else type(optimizer).__name__


def label_of(plan: Plan) -> str:
    return f"plan {hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]}"


def _formats_of(plan: Plan) -> Iterable[str]:
    patterns = [fmt for _, fmt in plan.patterns]
    return [fmt.name for fmt in (plan.default, *plan.operators.values(), *patterns) if fmt]


def checked(model: nn.Module, rounds: int, options: Mapping[str, object]) -> nn.Module:
    """Return the module to measure, without its wrappers; raise for invalid arguments."""
    check_model(model)
    if rounds < 1:
        message = f"a plan cannot be measured {rounds} times"
        raise OptionError(message, where="repeats", do="give 1 or more")
    inputs = Options.parse(options)
    if inputs.skip_unprofitable:
        raise OptionError(
            "a measurement runs operators in every format to find the faster ones",
            where='option "skip_unprofitable"',
            do="leave the option out; plans made from the profile avoid formats that do not pay",
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
            do='move the model there, or take a catalog device: qsync_fx.devices.get("t4")',
        )
    return module


def optimizer_of(model: nn.Module, value: GivenOptimizer | None) -> Optimizer | None:
    """Return the given optimizer, or the one that the given function makes; None for none.

    Warns of parameters that are not the model's, as the predicted memory excludes them.
    """
    if value is None:
        return None
    result: Any = value
    if callable(value) and not isinstance(value, Optimizer | nn.Module):
        result = value([parameter for parameter in model.parameters() if parameter.requires_grad])
    name = type(result).__name__
    do = "write optimizer=torch.optim.SGD(model.parameters(), lr=0.1), or give torch.optim.SGD"
    if not isinstance(result, Optimizer):
        message = f"an optimizer is expected to be a torch.optim.Optimizer, and not of type {name}"
        raise OptionError(message, where="optimizer", do=do)
    owned = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in result.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in updated if id(parameter) not in owned]
    if len(strange) == len(updated):
        kind = type(model).__name__
        message = f"the optimizer, {name}, updates no parameter of the model, a {kind}"
        raise OptionError(message, where="optimizer", do=do)
    if strange:
        count = sum(parameter.numel() for parameter in strange)
        message = (
            f"{len(strange)} of {len(updated)} parameters that {name} updates, {count} numbers, "
            "are not the model's: the predicted memory excludes them"
        )
        warnings.warn(message, stacklevel=3)
    return result


_CACHED: Final = (1.0, 0.015)
"""Seconds to compile a model from torch's caches: fixed, and per operator."""
_NEW: Final = (5.0, 0.2)
"""The same without cached graphs, measured on two cores for BERT-base and ResNet-18."""


def estimated_seconds(
    observed: ObservedStep, plans: int, steps_s: float = 0.0
) -> tuple[float, float]:
    """Return `steps_s` plus the seconds to compile all plans, with cached graphs and without."""
    operators = len(observed.explanation.operators)
    cached, new = (plans * (fixed + each * operators) for fixed, each in (_CACHED, _NEW))
    return cached + steps_s, new + steps_s


def step_count(plans: int, rounds: int) -> int:
    """Return the number of steps, with those that compile and measure peaks."""
    return plans * (rounds * _ROUND_STEPS + 3)


def sensitivity_seconds(observed: ObservedStep, name: str, formats: int) -> tuple[float, float]:
    passes = method(name).passes(len(observed.explanation.plan().operators), formats)
    each = FRACTION * passes * observed.seconds.passes
    return LEAST * each, STEPS * each


def costs(observed: Sequence[ObservedStep], plans: int, rounds: Sequence[int]) -> str:
    """Return the cost of measuring plans at each batch size, in its number of rounds."""
    count, seconds = len(observed), [0.0, 0.0]
    steps = [step_count(plans, number) for number in rounds]
    for item, number in zip(observed, steps, strict=True):
        estimate = estimated_seconds(item, plans, number * item.seconds.full)
        seconds = [total + value for total, value in zip(seconds, estimate, strict=True)]
    sizes = f" with {many(count, 'batch size')}" if count > 1 else ""
    return (
        f"measuring {observed[0].model.name} under {many(plans, 'plan')}{sizes}: "
        f"{many(plans * count, 'compilation')} and {sum(steps)} steps, {_about(seconds)}"
    )


def sensitivity_costs(observed: ObservedStep, sensitivity: str | None, formats: int) -> str:
    if sensitivity is None:
        return ""
    least, most = map(roughly, sensitivity_seconds(observed, sensitivity, formats))
    return f"; then {LEAST} to {STEPS} steps for the sensitivity, {least} to {most}"


def sending_costs(observed: ObservedStep, ranks: int) -> str:
    if ranks == 1:
        return ""
    steps_s = PLANS * planned_seconds(observed.seconds.full)
    about = _about(estimated_seconds(observed, PLANS, steps_s))
    return f"; then steps of all {ranks} ranks together under {PLANS} plans, {about}"


def _about(seconds: Sequence[float]) -> str:
    cached, new = map(roughly, seconds)
    return f"about {cached} with the compiled code in torch's caches, {new} without"


def _loaded_base(
    profile: Profile | Path | None, plans: Sequence[Plan], precisions: object
) -> Profile | None:
    if profile is None:
        return None
    do = "or leave the profile out to measure the model again"
    if not plans:
        message = "plans correct a profile, and there is none"
        raise OptionError(message, where="plan", do=f"give the plan to measure, {do}")
    if precisions is not None:
        message = "a correction of a profile keeps its precisions"
        raise OptionError(message, where="precisions", do=f"leave them out, {do}")
    return profile if isinstance(profile, Profile) else Profile.load(profile)
