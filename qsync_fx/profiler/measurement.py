"""`measure`: a profile of a model on the device at hand.

Every plan is compiled once, then all take turns, in one process: what else the machine does falls on all of them. In a turn a plan runs
three steps: one to have its memory and caches as it wants them, one that is timed as a whole, and one that is timed line by line.

Invariant: the model, its optimizer and the random number generators are as they were afterwards; what was measured before an interruption
is not measured again.

What measuring a model will cost, in words, before it is done, and what is left of it meanwhile.

What is given to be measured, checked before anything runs.

Invariant: an optimizer that comes out of here updates the model.

A profile that is there, corrected by plans that are measured themselves.

Machines are faster at one time than at another: others use them, or it is their clocks and heat. So the first plan of the profile runs in
turns with those that correct it, and what they took is put as if the machine were as fast as it was then, where it differs by more than
chance. Where a plan is that first one, it says itself how fast the machine is now, and nothing else.

Invariant: what the profile holds of other plans stays as it was measured, and it is of the same model, machine, options and optimizer. Of
runs of one plan the latest counts.
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
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.plan_loading import HoldsPlan, device_plans
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.profiler.links.collective_times import ranks
from qsync_fx.profiler.links.joint_steps import planned_seconds
from qsync_fx.profiler.links.link_measurement import PLANS, coding_speeds, linked
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.observed_step import ObservedStep, States, add, observed, profile_plans
from qsync_fx.profiler.profile import PROFILE, Model, Profile
from qsync_fx.profiler.progress import progress as shown_progress
from qsync_fx.profiler.run_statistics import MeasuredRun, levelled
from qsync_fx.profiler.samples import SAMPLES, Samples, StepSample, resumed, run_of
from qsync_fx.profiler.sensitivity.estimate import FRACTION, LEAST, STEPS, several as sensitivities
from qsync_fx.profiler.sensitivity.indicator_registry import method
from qsync_fx.profiler.timing.attribution import attribute
from qsync_fx.profiler.timing.inductor_lines import Files, watching
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
from qsync_fx.profiler.timing.step_validation import Compiled, compiling
from qsync_fx.profiler.training_state import untouched
from qsync_fx.serialization.schema import Path

_TURN: Final = 3
"""Steps that a plan runs in its turn, and around its compilation."""
_KNOWN: Final = (1.0, 0.015)
"""Seconds that it takes to compile a model, and each operator of it more, where its graphs are in torch's caches."""
_NEW: Final = (5.0, 0.2)
"""The same where they are not: most of it compilers of C++ take, for kernels that are not alike. On two cores a BERT-base of 302 operators
took 45 s a plan, and a ResNet-18 of 69 some 40 s of the processor's."""


def costs(observed: ObservedStep, plans: int, rounds: int) -> str:
    """Returns what it takes to measure a model under so many plans, in so many turns each."""
    from qsync_fx.formatting import many

    steps = plans * (rounds * _TURN + 3)
    message = f"measuring {observed.model.name} under {many(plans, 'plan')}: {many(plans, 'compilation')} and {steps} steps"
    return f"{message}, {_about(observed, plans, steps * _step(observed))}"


def sensitivity_costs(observed: ObservedStep, sensitivity: str | None, formats: int) -> str:
    """Returns what it takes to find a sensitivity beside; "" for none."""
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
    """Returns what it takes to find what sending gradients takes of a step; "" where one rank is alone."""
    if ranks == 1:
        return ""
    steps = PLANS * planned_seconds(_step(observed))
    return f"; then steps of all {ranks} ranks together under {PLANS} plans, {_about(observed, PLANS, steps)}"


class Left:
    """What is left of a measurement, by how long its parts took; each of both lists grows as they are done.

    Args:
        seen: the model.
        plans, rounds: how many plans are compiled, and how many turns each has then.
    """

    def __init__(self, observed: ObservedStep, plans: int, rounds: int) -> None:
        self._plans, self._turns, self._turn = plans, plans * rounds, _TURN * _step(observed)
        self.compiled: list[float] = []
        self.turned: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds that all plans take that are not compiled, and all turns that have not been. The first plan has compilers start."""
        each = _mean(self.compiled[1:] or self.compiled, 0.0)
        turns = (self._turns - len(self.turned)) * _mean(self.turned, self._turn)
        return (self._plans - len(self.compiled)) * each + turns


def _mean(seconds: Sequence[float], unknown: float) -> float:
    return statistics.fmean(seconds) if seconds else unknown


def _about(observed: ObservedStep, plans: int, steps: float) -> str:
    """Returns in words what it takes to compile the model under so many plans, and steps that take so many seconds."""
    from qsync_fx.formatting import roughly

    operators = len(observed.explanation.operators)
    available, new = (
        roughly(plans * (fixed + each * operators) + steps) for fixed, each in (_KNOWN, _NEW)
    )
    return f"about {available} where torch's caches hold what is compiled, {new} where not"


def _step(observed: ObservedStep) -> float:
    return observed.seconds.passes + observed.seconds.optimizer


GivenOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer]
"""One of the model's parameters, or what makes one of them."""

_ONE: Final = "optimizer=torch.optim.SGD(model.parameters(), lr=0.1)"


def checked(model: nn.Module, rounds: int, options: Mapping[str, object]) -> nn.Module:
    """Returns the module that is to be measured, without what wraps it.

    Raises:
        OptionError: it is no module, or not to be measured so often, or under these options.
        ProfileError: it does not lie on one device that is at hand.
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
    """Returns the optimizer that was given, or that what was given makes of the model's parameters; None for none.

    Warns of parameters in it that are not the model's: no graph tells of their memory.

    Raises:
        OptionError: it is no optimizer, or updates no parameter of the model.
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
"""By how much, of it, steps differ by chance at least, where too few were measured to know."""
_OF_MEDIAN: Final = 1.86
"""The standard error of a median of normal numbers, by the median of how far they lie from it and the root of their count."""


def check_asked(plans: Sequence[Plan], precisions: object) -> None:
    """Raises `OptionError` where nothing is asked for that would correct a profile, or more than can be added to one."""
    if not plans:
        do = "give the plan that is to be measured, or leave the profile out to measure the model anew"
        raise OptionError("a profile is corrected by plans, and there is none", where="plan", do=do)
    if precisions is not None:
        do = "leave them out, or leave the profile out to measure the model anew"
        raise OptionError(
            "a profile that is corrected keeps its precisions", where="precisions", do=do
        )


def check_same(profile: Profile, machine: Machine, model: Model, optimizer: str) -> None:
    """Raises `ProfileError` where a profile is of something else than what is at hand."""
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
    """Returns a profile with the runs of another one of the same model that are of the user's plans, in place of what it held of these.

    What the loss takes stays, too, but where it was not known.
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
    """Returns the plans that are to run to correct a profile: the user's, by their labels, and the first that the profile has."""
    result: dict[str, tuple[Plan, States]] = {}
    for label, plan in requested.items():
        add(result, label, plan, explanation)
    add(result, profile.runs[0].label, Plan.uniform(profile.precisions[0]), explanation)
    return result


def _pace(then: MeasuredRun, now: MeasuredRun) -> float:
    """Returns how fast the machine is now, of what it was; 1 where both differ by chance."""
    pace = then.passes / now.passes
    return pace if abs(pace - 1) > math.hypot(_uncertain(then), _uncertain(now)) else 1.0


def _uncertain(run: MeasuredRun) -> float:
    """Returns the standard error of what a run's passes take, as a share of it."""
    return _OF_MEDIAN * max(_CHANCE, run.spread) / math.sqrt(len(run.steps))


def _states(run: MeasuredRun) -> list[tuple[str, str | None, str | None]]:
    return [(measured.operator, measured.precision, measured.output) for measured in run.operators]


REPEATS = 7
SETTLED = 0.1
"""The standard error of what each operator adds to the variance of the gradients, as a share, in proportion to the others, within which
it is known well enough (`statistics.settling`)."""


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
    """Measures a model on the device that it lies on: how long each operator takes in each format, and how much memory a step needs.

    Says before, on standard error, what that will cost. Nothing is trained.

    Args:
        model: a module, in the mode (train or eval) that it is to be measured in.
        step: what a training step computes: takes the model and a batch, returns the loss.
        batches: the first one is what every step that is timed gets.
        precisions: the formats to measure; by default those that the device computes itself.
        optimizer: what updates the model, or makes that of a list of its parameters; without one a profile tells of forward and backward
            passes alone.
        plan: is measured itself, too, or several are, also as find_plan returns them, which corrects what the profile says of it.
        profile: one that was measured before of the same model on this machine, or the path of its file: then plans alone are measured, in
            turns with its first one, by which it is known how fast the machine is now, and what comes out is that profile, corrected. Its
            sensitivity and all-reduces stay.
        repeats: how many turns each plan has.
        sensitivity: how it is found what each operator adds to the variance of the gradients (`qsync_fx.sensitivity`), over the first 50
            batches, or fewer once that is known to 10%; a list that is shorter starts again. None to leave it out.
        path: where the profile is written. What is measured is kept beside it, in files that end with ".partial", until all is, so that a
            measurement that was interrupted goes on from there when it is called again.
        options: of the backend, for all plans.
        all_reduce: whether to measure all-reduces too, and what sending gradients takes of a step, where torch.distributed is up: all ranks
            wait for one another then. A function is called before that, and returns once all of them are here.
        progress: whether to show it.

    Raises:
        ProfileError: the step does not train the model, the profile is of something else, or an interrupted measurement of something
            else is at `path`, or nothing can be written there.
        QSyncError: an option, a precision or the plan does not fit.
    """
    if path is not None:
        PROFILE.check_writable(path)
    if sensitivity is not None:
        method(sensitivity)
    module = checked(model, repeats, options or {})
    updating = optimizer_of(module, optimizer)
    first, batches = first_batch(batches)
    requested = device_plans(plan)
    available = _known(profile, requested, precisions)
    device = next(module.parameters()).device
    machine = this_machine(device)
    formats = (
        _formats(precisions, device)
        if available is None
        else [precision(name) for name in available.graph.formats]
    )
    gpu = GpuTimer(device) if device.type == "cuda" else None
    clock = clock_for(torch.get_num_threads()) if gpu is None else clock_of(device)
    training = TrainingStep(step, first, updating, lambda: _zero(module, updating), clock)
    partial = None if path is None else pathlib.Path(f"{path}.partial")
    found_so_far = None if path is None else pathlib.Path(f"{path}.sensitivity.partial")
    with untouched(module, updating), compiling() as compile_under:
        visited = observed(module, training, options or {})
        name = type(updating).__name__ if updating is not None else ""
        if available is not None:
            check_same(available, machine, visited.model, name)
        plans = (
            _plans(visited, formats, requested)
            if available is None
            else again(available, visited.explanation, _labelled(requested))
        )
        samples = Samples(machine, visited.model, name, {label: [] for label in plans})
        samples = samples if partial is None else resumed(partial, samples)
        left = max(0, repeats - samples.rounds)
        if progress:
            neighbours = sensitivity_costs(
                visited, sensitivity if available is None else None, len(formats)
            )
            neighbours += sending_costs(visited, ranks() if available is None and all_reduce else 1)
            print(
                f"qsync: {costs(visited, len(plans), left)}{neighbours}",
                file=sys.stderr,
                flush=True,
            )
        with (
            watching(visited.model.digest) as files,
            shown_progress("measuring", len(plans) * (1 + left), progress) as advance,
        ):
            compiled: dict[str, Compiled] = {}
            peaks: dict[str, int] = {}
            ahead = Left(visited, len(plans), left)
            for label, (chosen, _) in plans.items():
                begin = time.perf_counter()
                asked_for = {**(options or {}), "plan": chosen}
                compiled[label] = compile_under(module, asked_for, training)
                if files.unknown:
                    with files.anew():
                        compiled[label] = compile_under(module, asked_for, training)
                run = functools.partial(training.run, compiled[label])
                peaks[label] = measured_peak(run, device)
                ahead.compiled.append(time.perf_counter() - begin)
                advance(f"compiled {label}", ahead.seconds)
            for _ in range(left):
                used = {}
                for label in plans:
                    begin = time.perf_counter()
                    used[label] = _turn(compiled[label], training, files, gpu)
                    ahead.turned.append(time.perf_counter() - begin)
                    advance(label, ahead.seconds)
                for label, sample in used.items():
                    samples.plans[label].append(sample)
                if partial is not None:
                    SAMPLES.write(partial, SAMPLES.encode(samples))
    measured = replace(
        _profile(samples, visited, plans, formats, peaks), optimizer_memory=known_memory(updating)
    )
    if available is not None:
        measured = corrected(available, measured)
    if available is None:
        measured = replace(measured, codecs=coding_speeds(device))
    if available is None and sensitivity is not None:
        settings: dict[str, Any] = {
            "options": dict(options or {}),
            "partial": found_so_far,
            "within": SETTLED,
            "shown": progress,
        }
        (result,) = sensitivities(model, step, batches, [sensitivity], formats, **settings)
        measured = replace(measured, sensitivity=result)
    if available is None and all_reduce:
        if callable(all_reduce):
            all_reduce()
        with untouched(module, updating), compiling() as compile_under:

            def compiled_as(wrapped: nn.Module, passes: TrainingStep, plan: Plan) -> Compiled:
                return compile_under(wrapped, {**(options or {}), "plan": plan}, passes)

            links = linked(measured, module, compiled_as, training)
        measured = replace(measured, collectives=links)
    if path is not None:
        measured.save(path)
        for saved in (partial, found_so_far):
            if saved is not None:
                saved.unlink(missing_ok=True)
    return measured


def _known(
    profile: Profile | Path | None, plans: Sequence[Plan], precisions: object
) -> Profile | None:
    """Returns the profile that is to be corrected, which may be given as the path of its file."""
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
        # By one thread, so that the backward pass is watched, too.
        with timing_kernels(files, gpu) as queued, torch.autograd.set_multithreading_enabled(False):
            replace(training, clock=queued.clock).run(compiled, queued)
        result = attribute(queued.seconds(full), files)
        return StepSample(
            full.forward, full.backward, full.optimizer, dict(result.operators), result.quantized
        )
    with timing_lines(files, training.clock) as lines:
        watched = training.run(compiled, lines)
    # Watching slows down what lies between the lines, and the two steps are two.
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
    """Returns the formats that are measured and those that plans of the user's ask for beside them, each once."""
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
    """Returns the plans that are to run: those that all profiles have, of these formats, and those of the user's."""
    result = profile_plans(observed.explanation, formats)
    for label, plan in _labelled(requested).items():
        add(result, label, plan, observed.explanation)
    return result


def _labelled(requested: Sequence[Plan]) -> dict[str, Plan]:
    return {label_of(plan): plan for plan in requested}


def label_of(plan: Plan) -> str:
    """Returns what the run of a plan of the user's is called."""
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
