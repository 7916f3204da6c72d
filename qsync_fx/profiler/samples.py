"""What has been measured so far, in a file, so that a measurement that was interrupted goes on from there.

Invariant: what is in the file are whole rounds, in each of which every plan had its turn; it is replaced whole after each.
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
    """One plan in one round.

    Attributes:
        forward, backward, optimizer: seconds of a step that nothing watched.
        operators: seconds of each operator, by id, in a step that was timed line by line, in proportion to this one.
        quantized: the quantizers of that step, likewise.
    """

    forward: float
    backward: float
    optimizer: float
    operators: dict[str, Passes]
    quantized: list[Quantized]


@dataclass(frozen=True)
class Samples:
    """
    Attributes:
        machine, model: where and of what they were taken.
        optimizer: the class of the optimizer; "" for none.
        plans: the samples of each plan, one a round, by the plan in words.
    """

    machine: Machine
    model: Model
    optimizer: str
    plans: dict[str, list[StepSample]]

    @property
    def rounds(self) -> int:
        """How many rounds there are of every plan."""
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
    """Returns what an interrupted measurement has left at `path`, or `empty` where there is no such file.

    Raises:
        ProfileError: the file is none, or one of something else.
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
    """Returns what the samples of a plan say together: medians over the rounds."""
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
