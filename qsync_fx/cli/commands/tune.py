"""`qsync tune`: fastest kernel for each product of a model, measured on a GPU.

Invariant: the table on disk changes only after all measurements, and only in measured rows. With
recorded timings no measurement runs, and results are saved only to an explicit --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import DeviceError, OptionError, QSyncError
from qsync_fx.formatting import many

if TYPE_CHECKING:
    import torch
    from rich.table import Table as Printed

    from qsync_fx.backend.cuda.kernel_config import Arch
    from qsync_fx.backend.cuda.layer_times import LayerTimes
    from qsync_fx.backend.cuda.problem import Problem
    from qsync_fx.backend.cuda.tuning import (
        Environment,
        RecordingTimer,
        Timer,
        TunedChoice,
        TuningTable,
    )
    from qsync_fx.graph.graph import PrecisionGraph

_ABOUT = """\
Measures torch's implementation and each suitable kernel for every matrix product
and convolution of a model, forward and backward, and saves the fastest. Then it
measures every layer as a whole, with quantization, in the given precision and in
BF16: by default, layers that are not faster stay in BF16.

Sizes are rounded to the next quarter of a power of two, so one run covers similar
batches. A kernel replaces torch if it is more than 3 % faster; int8 and fp8 are used
if they are faster than bf16."""

_EXAMPLES = """\
examples:
  qsync tune bert:small --precision int8
  qsync tune bert:small --precision fp8 --device cuda:1 --repeats 21
  qsync tune bert:small --precision int8 --record h200.json   save every timing
  qsync tune bert:small --precision int8 --recorded h200.json choose without a GPU"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    model_args.add(parser)
    measured = parser.add_argument_group("measurement")
    add_options(
        measured,
        """
        --device NAME    GPU to measure on, such as cuda:1
        --repeats N      measurements of each candidate; 9 by default
        --recorded FILE  read timings from this file instead of measuring
        """,
        {"repeats": int, "recorded": Path},
        device="cuda",
    )
    saved = parser.add_argument_group("output")
    add_options(
        saved,
        """
        --record FILE  also write every timing to this file
        --output FILE  file for the table of results instead of the user's own
        --json         print all choices and medians as one JSON object
        """,
        {"record": output.to_write, "output": Path},
    )


def _tune(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda import tuning
    from qsync_fx.backend.cuda.kernel_config import wide
    from qsync_fx.backend.cuda.runtime import device_state
    from qsync_fx.backend.cuda.tuning import ROUNDS, buckets, shown, tune_all
    from qsync_fx.backend.operators.layer_kernels import problems_of, scaled_layers

    rounds = ROUNDS if arguments.repeats is None else arguments.repeats
    if rounds < 1:
        message = f"the number of measurements is {rounds}, but must be at least 1"
        raise OptionError(message, where="--repeats", do="use 1 or more")
    if arguments.recorded and arguments.record:
        message = "--recorded reads timings and --record writes them, which excludes each other"
        raise OptionError(message, where="--recorded, --record", do="remove one of them")
    if arguments.output is not None:
        tuning.check_writable(arguments.output)
    gpu: torch.device | None
    make: Callable[[Problem], Timer]
    keepers: dict[Problem, RecordingTimer] = {}
    if arguments.recorded is not None:
        recording = tuning.load_recording(arguments.recorded)
        current, arch, make = recording.environment, recording.arch, recording.timer
        gpu, graphs = None, _graphs(arguments, None)
        problems = buckets(problems_of(graphs), wide(arch))
    else:
        gpu, arch = _gpu(arguments.device)
        current, graphs = device_state.environment(gpu), _graphs(arguments, gpu)
        problems = buckets(problems_of(graphs), wide(arch))
        _compile(problems, arch)
        make, keepers = _measuring(gpu, arch)
    if not problems:
        raise OptionError(
            "there is no product to tune: torch computes every product of this model",
            where=arguments.model,
            do="set a --precision that has kernels, such as int8; see qsync inspect",
        )

    skipped: dict[Problem, str] = {}
    with output.progress("tuning", len(problems)) as advance:

        def report(problem: Problem, choice: TunedChoice | None, why: str) -> None:
            if choice is None:
                skipped[problem] = why
            advance(shown(problem))

        candidates = functools.partial(_candidates, arch=arch)
        choices = tune_all(problems, candidates, make, rounds, report, wide(arch))
    wanted = scaled_layers(graphs, wide(arch))
    if gpu is None:
        layers = [recording.layers[key] for key in wanted if key in recording.layers]
    else:
        table = tuning.TuningTable(current, {choice.problem: choice for choice in choices})
        layers = _layers(wanted, gpu, table, rounds, skipped)
    if arguments.record is not None:
        timings = {problem: keeper.seconds for problem, keeper in keepers.items()}
        recorded = tuning.TimingRecording(current, arch, timings, tuning.by_layer(layers))
        tuning.save_recording(arguments.record, recorded)
        output.wrote(arguments.record)
    path = arguments.output
    if path is None and not arguments.recorded:
        path = tuning.path_in(device_state.folder(), current)
    if path is not None and choices:
        tuning.save_table(path, current, choices, layers)
        device_state.forget()
        output.wrote(path)
    _show(arguments, current, arch, choices, layers, skipped)


def _gpu(name: str) -> tuple[torch.device, Arch]:
    import torch

    from qsync_fx.backend.cuda.runtime import device_state

    try:
        gpu = torch.device(name)
    except RuntimeError:
        raise OptionError(
            f"{name!r} is not a device",
            where="--device",
            do="write cuda, or cuda:1 for the second GPU",
        ) from None
    count = torch.cuda.device_count()
    if gpu.type != "cuda" or (gpu.index or 0) >= count:
        raise DeviceError(
            f"there is no GPU {name}: this machine has {many(count, 'GPU') if count else 'no GPU'}",
            where="--device",
            do="run qsync tune on a machine with a GPU, or use its timings with --recorded FILE",
        )
    gpu = torch.device("cuda", gpu.index or 0)
    result = device_state.known_of(gpu)
    if result.arch is None:
        message = f"there are no kernels for this GPU: {result.reason}"
        raise DeviceError(message, where=str(gpu), do="see qsync doctor")
    return gpu, result.arch


def _graphs(arguments: argparse.Namespace, gpu: torch.device | None) -> list[PrecisionGraph]:
    """Return the graphs of the model, in which no layer is left in a wider format."""
    inputs = model_args.read(arguments)
    if gpu is not None:
        inputs = inputs.on(gpu)
    options = dataclasses.replace(inputs.options, skip_unprofitable=False)
    return list(dataclasses.replace(inputs, options=options).explain().lowered_graphs)


def _layers(
    wanted: Sequence[tuple[Problem, str]],
    gpu: torch.device,
    table: TuningTable,
    rounds: int,
    skipped: dict[Problem, str],
) -> list[LayerTimes]:
    """Measure layers with the tuned kernels; add the others to `skipped`, with the reason."""
    from qsync_fx.backend.cuda.runtime.device_state import tuned_by
    from qsync_fx.backend.cuda.runtime.layer_timer import time_layer
    from qsync_fx.backend.cuda.tuning import shown

    result = []
    with output.progress("layers", len(wanted)) as advance, tuned_by(table, gpu):
        for problem, precision in wanted:
            try:
                result.append(time_layer(problem, precision, gpu, rounds))
            except QSyncError as error:
                skipped[problem] = error.what
            advance(shown(problem))
    return result


def _compile(problems: Sequence[Problem], arch: Arch) -> None:
    """Compile all candidates in parallel; failures appear in the table of results."""
    from qsync_fx.backend.cuda import codegen
    from qsync_fx.backend.cuda.kernel_build import kernel_registry

    configs = (config for problem in problems for config in _candidates(problem, arch))
    kernel_registry.prepare(codegen.unit_of(config) for config in configs)


def _candidates(problem: Problem, arch: Arch) -> Sequence[Any]:
    from qsync_fx.backend.cuda.selection.select import dispatch_path

    result = dispatch_path(problem, arch)
    return () if isinstance(result, str) else result.configs


def _measuring(
    gpu: torch.device, arch: Arch
) -> tuple[Callable[[Problem], RecordingTimer], dict[Problem, RecordingTimer]]:
    """Return a factory of timers on a GPU, and the dict that collects them by problem."""
    from qsync_fx.backend.cuda.runtime.event_timer import EventTimer
    from qsync_fx.backend.cuda.selection.select import dispatch_path
    from qsync_fx.backend.cuda.tuning import RecordingTimer

    keepers: dict[Problem, RecordingTimer] = {}

    def make(problem: Problem) -> RecordingTimer:
        result = dispatch_path(problem, arch)
        # Timings are retained, but the tensors of finished measurements are freed.
        for keeper in keepers.values():
            keeper.timer = None
        keepers[problem] = RecordingTimer(
            EventTimer(problem, problem if isinstance(result, str) else result.problem, gpu)
        )
        return keepers[problem]

    return make, keepers


def _show(
    arguments: argparse.Namespace,
    current: Environment,
    arch: Arch,
    choices: list[TunedChoice],
    layers: list[LayerTimes],
    skipped: dict[Problem, str],
) -> None:
    from dataclasses import asdict

    from qsync_fx.backend.cuda.kernel_config import wide
    from qsync_fx.backend.cuda.tuning import (
        choice_as_json,
        layer_as_json,
        problem_as_json,
        shown,
    )

    if arguments.json:
        result = {
            "environment": asdict(current),
            "arch": arch,
            "choices": [choice_as_json(choice) for choice in choices],
            "layers": [layer_as_json(times) for times in layers],
            "skipped": [
                {"problem": problem_as_json(item), "reason": why} for item, why in skipped.items()
            ],
        }
        output.as_json(result)
        return
    output.show(_table(choices, wide(arch)))
    if layers:
        output.show(_layer_table(layers, wide(arch)))
    for problem, why in skipped.items():
        output.note(f"not measured: {shown(problem)}: {why}")


def _table(choices: list[TunedChoice], wide: str) -> Printed:
    from qsync_fx.backend.cuda.tuning import shown

    rows = []
    for choice in choices:
        torch_takes = choice.seconds.get("torch")
        others = {name: seconds for name, seconds in choice.seconds.items() if name != "torch"}
        best, ratio = min(others.values(), default=None), ""
        if torch_takes is not None and best is not None:
            ratio = f"{torch_takes / best:.2f}"
        cells = shown(choice.problem), _microseconds(torch_takes), _microseconds(best), ratio
        rows.append((*cells, choice.name, _note(choice, wide)))
    numbers = ("torch us", "kernel us", "ratio")
    return output.table(("problem", *numbers, "runs", "note"), rows, right=numbers)


def _layer_table(layers: list[LayerTimes], wide: str) -> Printed:
    from qsync_fx.backend.cuda.layer_times import PARTS
    from qsync_fx.backend.cuda.tuning import shown

    rows = []
    for times in layers:
        cells = [f"{times.speed([part]):.2f}" if part in times.seconds else "" for part in PARTS]
        note = "" if times.speed() >= 1 else f"stays in {wide} by default"
        rows.append((shown(times.problem), times.precision, *cells, f"{times.speed():.2f}", note))
    numbers = (*(part.replace("_", " ") for part in PARTS), "step")
    columns = (f"layer (speed over {wide})", "format", *numbers, "note")
    return output.table(columns, rows, right=numbers)


def _note(choice: TunedChoice, wide: str) -> str:
    notes = []
    if choice.faster_than_bf16 is False:
        notes.append(f"not faster than {wide}, so {choice.problem.a} is not used")
    if choice.failed:
        name, why = next(iter(choice.failed.items()))
        notes.append(f"{many(len(choice.failed), 'kernel')} failed: {name}: {why.splitlines()[0]}")
    return "; ".join(notes)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


COMMAND = Command("find the fastest kernels for a model", _tune, _arguments, _ABOUT, _EXAMPLES)
