"""`measure`: a profile of a model on the device at hand.

Every plan is compiled once, then all take turns, in one process: what else the machine does falls on all of them. In a turn a plan runs
three steps: one to have its memory and caches as it wants them, one that is timed as a whole, and one that is timed line by line.

Invariant: the model, its optimizer and the random number generators are as they were afterwards; what was measured before an interruption
is not measured again.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qsync_fx.codec import Path
from qsync_fx.devices import support
from qsync_fx.devices.machine import this_machine
from qsync_fx.errors import OptionError
from qsync_fx.plan import Plan
from qsync_fx.plan.reading import HoldsPlan, device_plans
from qsync_fx.precision import FORMATS, Precision, encoding, precision, precisions as named
from qsync_fx.predictor.model import model_graph
from qsync_fx.predictor.model.file import stored
from qsync_fx.profiling.correcting import again, check_asked, check_same, corrected
from qsync_fx.profiling.cost import Left, costs, sending_costs, sensitivity_costs
from qsync_fx.profiling.given import GivenOptimizer, checked, optimizer_of
from qsync_fx.profiling.gradients.coding_speed import coding_speeds
from qsync_fx.profiling.gradients.collectives import ranks
from qsync_fx.profiling.gradients.sending import linked
from qsync_fx.profiling.measuring.attribution import attribute
from qsync_fx.profiling.measuring.compiled import Compiled, compiling
from qsync_fx.profiling.measuring.kept import Files
from qsync_fx.profiling.measuring.kernels import watching
from qsync_fx.profiling.measuring.lines import timing_lines
from qsync_fx.profiling.measuring.optimizers import known_memory
from qsync_fx.profiling.measuring.peak import measured_peak
from qsync_fx.profiling.measuring.queued import Gpu, clock_of, timing_kernels
from qsync_fx.profiling.measuring.steps import StepFunction, Training, clock_for, first_batch
from qsync_fx.profiling.observed import Observed, observed
from qsync_fx.profiling.profile import PROFILE, Profile
from qsync_fx.profiling.profile_plans import States, add, profile_plans
from qsync_fx.profiling.progress import progress as shown_progress
from qsync_fx.profiling.runs import levelled
from qsync_fx.profiling.samples import SAMPLES, Sample, Samples, resumed, run_of
from qsync_fx.profiling.statistics.indicators.methods import method
from qsync_fx.profiling.statistics.measured import several as sensitivities
from qsync_fx.profiling.untouched import untouched

ROUNDS = 7
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
    rounds: int = ROUNDS,
    sensitivity: str | None = "exact",
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
        rounds: how many turns each plan has.
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
    module = checked(model, rounds, options or {})
    updating = optimizer_of(module, optimizer)
    first, batches = first_batch(batches)
    asked = device_plans(plan)
    known = _known(profile, asked, precisions)
    device = next(module.parameters()).device
    machine = this_machine(device)
    formats = _formats(precisions, device) if known is None else [precision(name) for name in known.graph.formats]
    gpu = Gpu(device) if device.type == "cuda" else None
    clock = clock_for(torch.get_num_threads()) if gpu is None else clock_of(device)
    training = Training(step, first, updating, lambda: _zero(module, updating), clock)
    partial = None if path is None else pathlib.Path(f"{path}.partial")
    found_so_far = None if path is None else pathlib.Path(f"{path}.sensitivity.partial")
    with untouched(module, updating), compiling() as compile_under:
        seen = observed(module, training, options or {})
        name = type(updating).__name__ if updating is not None else ""
        if known is not None:
            check_same(known, machine, seen.model, name)
        plans = _plans(seen, formats, asked) if known is None else again(known, seen.explanation, _labelled(asked))
        samples = Samples(machine, seen.model, name, {label: [] for label in plans})
        samples = samples if partial is None else resumed(partial, samples)
        left = max(0, rounds - samples.rounds)
        if progress:
            beside = sensitivity_costs(seen, sensitivity if known is None else None, len(formats))
            beside += sending_costs(seen, ranks() if known is None and all_reduce else 1)
            print(f"qsync: {costs(seen, len(plans), left)}{beside}", file=sys.stderr, flush=True)
        with (
            watching(seen.model.digest) as files,
            shown_progress("measuring", len(plans) * (1 + left), progress) as advance,
        ):
            compiled: dict[str, Compiled] = {}
            peaks: dict[str, int] = {}
            ahead = Left(seen, len(plans), left)
            for label, (chosen, _) in plans.items():
                begin = time.perf_counter()
                asked_for = {**(options or {}), "plan": chosen}
                compiled[label] = compile_under(module, asked_for, training)
                if files.unknown:
                    with files.anew():
                        compiled[label] = compile_under(module, asked_for, training)
                peaks[label] = measured_peak(lambda label=label: training.run(compiled[label]), device)  # type: ignore[misc]
                ahead.compiled.append(time.perf_counter() - begin)
                advance(f"compiled {label}", ahead.seconds)
            for _ in range(left):
                taken = {}
                for label in plans:
                    begin = time.perf_counter()
                    taken[label] = _turn(compiled[label], training, files, gpu)
                    ahead.turned.append(time.perf_counter() - begin)
                    advance(label, ahead.seconds)
                for label, sample in taken.items():
                    samples.plans[label].append(sample)
                if partial is not None:
                    SAMPLES.write(partial, SAMPLES.encode(samples))
    measured = replace(_profile(samples, seen, plans, formats, peaks), optimizer_memory=known_memory(updating))
    if known is not None:
        measured = corrected(known, measured)
    if known is None:
        measured = replace(measured, codecs=coding_speeds(device))
    if known is None and sensitivity is not None:
        how: dict[str, Any] = {
            "options": dict(options or {}),
            "partial": found_so_far,
            "within": SETTLED,
            "shown": progress,
        }
        (found,) = sensitivities(model, step, batches, [sensitivity], formats, **how)
        measured = replace(measured, sensitivity=found)
    if known is None and all_reduce:
        if callable(all_reduce):
            all_reduce()
        with untouched(module, updating), compiling() as compile_under:

            def compiled_as(wrapped: nn.Module, passes: Training, plan: Plan) -> Compiled:
                return compile_under(wrapped, {**(options or {}), "plan": plan}, passes)

            links = linked(measured, module, compiled_as, training)
        measured = replace(measured, collectives=links)
    if path is not None:
        measured.save(path)
        for kept in (partial, found_so_far):
            if kept is not None:
                kept.unlink(missing_ok=True)
    return measured


def _known(profile: Profile | Path | None, plans: Sequence[Plan], precisions: object) -> Profile | None:
    """Returns the profile that is to be corrected, which may be given as the path of its file."""
    if profile is None:
        return None
    check_asked(plans, precisions)
    return profile if isinstance(profile, Profile) else Profile.load(profile)


def _turn(compiled: Compiled, training: Training, files: Files, gpu: Gpu | None) -> Sample:
    training.run(compiled)
    whole = training.run(compiled)
    if gpu is not None:
        # By one thread, so that the backward pass is watched, too.
        with timing_kernels(files, gpu) as queued, torch.autograd.set_multithreading_enabled(False):
            replace(training, clock=queued.clock).run(compiled, queued)
        found = attribute(queued.seconds(whole), files)
        return Sample(whole.forward, whole.backward, whole.optimizer, dict(found.operators), found.quantized)
    with timing_lines(files, training.clock) as lines:
        watched = training.run(compiled, lines)
    # Watching slows down what lies between the lines, and the two steps are two.
    scale = whole.passes / watched.passes
    found = attribute({line: seconds * scale for line, seconds in lines.seconds.items()}, files)
    return Sample(whole.forward, whole.backward, whole.optimizer, dict(found.operators), found.quantized)


def _profile(
    samples: Samples,
    seen: Observed,
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
        stored(model_graph(seen.explanation, _asked([fmt.name for fmt in formats], plans.values()))),
        [fmt.name for fmt in formats],
        levelled(runs),
        samples.optimizer,
        fingerprint=seen.fingerprint,
        loss_memory=seen.loss,
    )


def _asked(formats: list[str], plans: Iterable[tuple[Plan, States]]) -> list[str]:
    """Returns the formats that are measured and those that plans of the user's ask for beside them, each once."""
    named = [
        fmt.name
        for plan, _ in plans
        for fmt in (plan.default, *plan.operators.values(), *(chosen for _, chosen in plan.patterns))
        if fmt is not None
    ]
    return list(dict.fromkeys([*formats, *named]))


def _plans(seen: Observed, formats: Sequence[Precision], asked: Sequence[Plan]) -> dict[str, tuple[Plan, States]]:
    """Returns the plans that are to run: those that all profiles have, of these formats, and those of the user's."""
    found = profile_plans(seen.explanation, formats)
    for label, plan in _labelled(asked).items():
        add(found, label, plan, seen.explanation)
    return found


def _labelled(asked: Sequence[Plan]) -> dict[str, Plan]:
    return {label_of(plan): plan for plan in asked}


def label_of(plan: Plan) -> str:
    """Returns what the run of a plan of the user's is called."""
    return f"plan {hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]}"


def _formats(precisions: Sequence[str | Precision] | None, device: torch.device) -> list[Precision]:
    if precisions is not None:
        found = named(precisions)
        if not found:
            raise OptionError("no precision is to be measured", where="precisions", do="name one or more")
        return found
    return [
        fmt
        for fmt in FORMATS.values()
        if fmt.bits <= 32 and encoding(fmt) is fmt and support(device, fmt).how == "native"
    ]


def _zero(module: nn.Module, optimizer: Optimizer | None) -> None:
    (module if optimizer is None else optimizer).zero_grad(set_to_none=True)
