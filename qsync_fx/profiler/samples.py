"""Checkpoint file of an interrupted measurement.

Invariant: the file contains only complete rounds, with one sample of every plan per round, and is
replaced atomically after each round.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from qsync_fx.devices.machine import Machine
from qsync_fx.errors import ProfileError
from qsync_fx.profiler.observed_step import States
from qsync_fx.profiler.profile import Model
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized
from qsync_fx.profiler.timing.attribution import Passes
from qsync_fx.serialization import Path, Schema


@dataclass(frozen=True)
class StepSample:
    """Times of one plan in one round.

    Attributes:
        forward, backward, optimizer: seconds of an untraced step.
        operators: seconds of each operator by id, from a step timed line by line and scaled to the
            untraced step.
        quantized: quantizer calls of the traced step, scaled likewise.
    """

    forward: float
    backward: float
    optimizer: float
    operators: dict[str, Passes]
    quantized: list[Quantized]


@dataclass(frozen=True)
class Samples:
    """Samples of all plans.

    Attributes:
        machine, model: the measured machine and model.
        optimizer: class name of the optimizer; "" for none.
        plans: samples by plan label, one per round.
    """

    machine: Machine
    model: Model
    optimizer: str
    plans: dict[str, list[StepSample]]

    @property
    def rounds(self) -> int:
        """Number of rounds that every plan has completed."""
        return min(map(len, self.plans.values()), default=0)


SAMPLES = Schema(
    Samples,
    noun="interrupted measurement",
    error=ProfileError,
    remedy="remove it to measure from the start",
    name="qsync-measurement",
    largest=256 * 2**20,
    smaller="measure fewer rounds",
)


def resumed(path: Path, empty: Samples) -> Samples:
    """Return the samples of an interrupted measurement at `path`, or `empty` if there is no file.

    Raises:
        ProfileError: the file is invalid, or belongs to another measurement.
    """

    def differs(result: Samples) -> str | None:
        try:
            result.machine.check(empty.machine)
            result.model.check(empty.model)
        except ProfileError as error:
            return error.what
        same = result.optimizer == empty.optimizer and result.plans.keys() == empty.plans.keys()
        return None if same else "it was measured with another optimizer or under other plans"

    result = SAMPLES.resumed(path, empty, differs)
    return replace(
        result, plans={name: used[: result.rounds] for name, used in result.plans.items()}
    )


def run_of(
    label: str, states: States, samples: list[StepSample], peak_bytes: int, planned: bool
) -> MeasuredRun:
    """Return the run of a plan, with the medians of its samples over the rounds."""
    operators = [
        MeasuredOperator(
            operator,
            *state.names,
            *(
                statistics.median(
                    sample.operators.get(operator, (0.0, 0.0))[index] for sample in samples
                )
                for index in (0, 1)
            ),
        )
        for operator, state in states
    ]
    calls = zip(*(sample.quantized for sample in samples), strict=True)
    quantized = [
        replace(same[0], seconds=statistics.median(call.seconds for call in same)) for same in calls
    ]
    steps = [(sample.forward, sample.backward, sample.optimizer) for sample in samples]
    return MeasuredRun(label, steps, peak_bytes, operators, quantized, planned)
