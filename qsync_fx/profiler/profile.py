"""`Profile`: the measurements of one model on one device, its file format and its table.

All times are in seconds and all sizes in bytes; none is negative or NaN. A profile contains the
model graph, so predictions need no model. It records its machine and model, and is rejected for
others. The table lists one operator per line, the most expensive first; its time in a format is
from the uniform run in that format. Operators without time or saved tensors are only counted.
"""

from __future__ import annotations

import functools
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import ProfileError
from qsync_fx.formatting import many, milliseconds, short
from qsync_fx.passes.cached_plan import Fingerprint
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.cost_mapper.plan_states import states
from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY, Sensitivity
from qsync_fx.predictor.memory.peak_memory import Anchor, LossMemory, OptimizerMemory
from qsync_fx.predictor.model.model_file import StoredGraph, restored
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.predictor.times import Times
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized, sizes, whole
from qsync_fx.serialization.schema import Path, Schema
from qsync_fx.text_tables import plain, table_of


@dataclass(frozen=True)
class Model:
    """Identity of the profiled model.

    Attributes:
        name: name of the model's class.
        digest: of its operators, all shapes, the modules in eval mode, and the backend's options.
        parameters: number of parameter elements.
        options: non-default options of the backend, in words.
        evaluated: number of modules in eval mode.
    """

    name: str
    digest: str
    parameters: int
    options: str = ""
    evaluated: int = 0

    @property
    def conditions(self) -> str:
        """Non-default options and modes in words; times are valid only under these conditions."""
        modes = f"{self.evaluated} modules in the mode to evaluate" if self.evaluated else ""
        return ", ".join(filter(None, (self.options, modes)))

    def check(self, current: Model) -> None:
        """Raise `ProfileError` if `current` is another model."""
        if self.digest != current.digest:
            raise ProfileError(
                f"it was taken of another model: {self}, and this is {current}",
                do="measure this model; its layers, the shapes of its inputs, its mode (train or eval) and options of the backend matter",
            )

    def __str__(self) -> str:
        conditions = f" with {self.conditions}" if self.conditions else ""
        return f"{self.name} of {self.parameters} parameters ({self.digest[:8]}){conditions}"


@dataclass(frozen=True)
class Collective:
    """Durations of all-reduces, and their effect on concurrent computation.

    Attributes:
        backend: backend of torch.distributed.
        ranks: number of ranks.
        seconds: pairs of bytes per rank and seconds of the slowest rank.
        busy: delay of concurrent computation on a rank, as a fraction of `seconds`; more than 1
            if both slow each other down.
        coding: the same fraction of the seconds in which codecs encode and decode; None if not
            measured.
        slowdown: factor on this rank's step time while other ranks train concurrently and no
            gradients are sent.
        copies: seconds per byte in which DistributedDataParallel copies gradients into a bucket,
            and again out of it, at the profile's machine speed; None if not measured.
        buffers: seconds per step to broadcast rank 0's buffers, such as batch norm statistics; 0
            without buffers.
    """

    backend: str
    ranks: int
    seconds: list[tuple[int, float]]
    busy: float = 0.0
    slowdown: float = 1.0
    copies: float | None = None
    buffers: float = 0.0
    coding: float | None = None


@dataclass(frozen=True)
class CodecSpeed:
    """Encoding and decoding speed of a codec on the device.

    Attributes:
        codec: its name.
        encode: bytes of FP32 gradients encoded per second.
        decode: bytes of FP32 gradients decoded and accumulated per second.
    """

    codec: str
    encode: float
    decode: float


@dataclass(frozen=True)
class Profile:
    """Measurements of one model on one device.

    Attributes:
        machine: the measured machine.
        model: identity of the model.
        stored: the model graph in its serialized form.
        precisions: names of the measured formats.
        runs: one per plan; first the plans of every profile, then user plans.
        optimizer: class name of the optimizer; "" for none.
        collectives: one per backend of torch.distributed.
        sensitivity: each operator's contribution to the variance of the gradients in each format;
            None if not measured.
        optimizer_memory: state and temporaries of the optimizer; None if unknown.
        codecs: codec speeds; empty if not measured.
        loss_memory: memory of the loss after the model; None if unknown.
        fingerprint: identity of the model's graphs for the plan cache; None if the model was not
            run here.
    """

    machine: Machine
    model: Model
    stored: StoredGraph
    precisions: list[str]
    runs: list[MeasuredRun]
    optimizer: str = ""
    collectives: list[Collective] = field(default_factory=list)
    sensitivity: Sensitivity | None = None
    optimizer_memory: OptimizerMemory | None = None
    fingerprint: Fingerprint | None = None
    codecs: list[CodecSpeed] = field(default_factory=list)
    loss_memory: LossMemory | None = None

    @functools.cached_property
    def graph(self) -> ModelGraph:
        """The model graph, from which states, casts and memory of any plan are computed."""
        return restored(self.stored)

    @property
    def optimizer_seconds(self) -> float:
        """Median seconds of the optimizer's step over all runs, as it depends on no format."""
        return statistics.median(step[2] for run in self.runs for step in run.steps)

    def save(self, path: Path) -> pathlib.Path:
        """Write the profile atomically, and return its path; `qsync_fx.cache_plan` caches it.

        Raises:
            ProfileError: if it cannot be written.
        """
        PROFILE.write(path, self.to_json())
        return pathlib.Path(path)

    def to_json(self) -> str:
        """Return the profile as the text of its file."""
        finite = None if self.sensitivity is None else self.sensitivity.finite()
        return PROFILE.encode(replace(self, sensitivity=finite))

    @classmethod
    def load(cls, path: Path, *, any_machine: bool = False) -> Profile:
        """Load a profile.

        Args:
            path: file that `save` wrote.
            any_machine: accept profiles of other machines or other versions of torch or qsync_fx,
                for the other devices of a cluster.

        Raises:
            ProfileError: the file is no valid profile, or was measured on another machine.
        """
        result = PROFILE.load(path)
        try:
            if not any_machine:
                result.machine.check(here_for(result.machine))
            _check_operators(result)
        except ProfileError as error:
            raise PROFILE.within(path, error) from None
        return result

    def times(self) -> Times:
        """Return the operator times under any plan, for the cost mapper."""
        from qsync_fx.profiler.profiled_times import ProfiledTimes

        return ProfiledTimes(self)

    def interpolated(self, plan: Plan) -> list[str]:
        """Return the operators whose state under a plan is in no run, and is interpolated."""
        from qsync_fx.profiler.profiled_times import interpolated

        return interpolated(self, plan)

    def __repr__(self) -> str:
        from qsync_fx.formatting import duration, many

        run = self.runs[0]
        return (
            f"Profile({self.model}, {self.machine.name}, {', '.join(self.precisions)}, {many(len(run.operators), 'operator')}, "
            f"{duration(run.passes)} in {run.label})"
        )

    def __str__(self) -> str:

        return profile_text(self)


def _table(collective: Collective) -> str | None:
    if (wrong := sizes(collective)) is not None:
        return wrong
    if not collective.slowdown:
        return " has the slowdown 0, which no measurement gives"
    if not collective.seconds:
        return " has an empty table of seconds"
    for (nbytes, seconds), (after, _) in zip(
        collective.seconds, [*collective.seconds[1:], (math.inf, 0.0)], strict=True
    ):
        if not (0 < nbytes < after and seconds > 0):
            return (
                f" has the seconds {seconds} for {nbytes} bytes; both are positive, and bytes grow"
            )
    return None


def _speed(speed: CodecSpeed) -> str | None:
    if not (0 < speed.encode < math.inf and 0 < speed.decode < math.inf):
        return f" has the speeds {speed.encode} and {speed.decode}; both are positive"
    return None


def _check_operators(profile: Profile) -> None:
    """Raise `ProfileError` if the measured operators are not the model's."""
    measured, live = (
        [m.operator for m in profile.runs[0].operators],
        [op.id for op in profile.graph.operators],
    )
    if measured != live:
        strange = sorted({*measured} ^ {*live}) or measured
        raise ProfileError(
            "what was measured is another model than the profile holds",
            where=strange[0],
            do="measure it anew",
        )


def _profile(profile: Profile) -> str | None:
    if not profile.runs:
        return " holds no run"
    if (wrong := sizes(profile)) is not None:
        return wrong
    first = [measured.operator for measured in profile.runs[0].operators]
    for run in profile.runs:
        if [measured.operator for measured in run.operators] != first:
            return (
                f" holds other operators in the run {run.label!r} than in {profile.runs[0].label!r}"
            )
    return None


_CHECKS: Final[Mapping[Any, Any]] = {
    MeasuredOperator: sizes,
    MeasuredRun: whole,
    Quantized: sizes,
    Model: sizes,
    Collective: _table,
    CodecSpeed: _speed,
    LossMemory: sizes,
    Profile: _profile,
    **SENSITIVITY.checks,
}

PROFILE = Schema(
    Profile,
    noun="profile",
    error=ProfileError,
    remedy="write profiles with Profile.save",
    name="qsync-profile",
    largest=64 * 2**20,
    smaller="measure fewer plans",
    checks=_CHECKS,
)


def anchors(profile: Profile, planned: bool = False) -> list[Anchor]:
    """Return each run with its operator states and peak memory, to correct predicted memory.

    Args:
        planned: restrict the result to user plans with a measured peak.
    """
    graph = profile.graph
    adjustable = {operator.id for operator in graph.operators if operator.kind == "adjustable"}
    result: list[Anchor] = []
    for run in profile.runs:
        if planned and not (run.planned and run.peak_bytes):
            continue
        requested = {
            item.operator: item.precision
            for item in run.operators
            if item.operator in adjustable and item.precision
        }
        result.append(Anchor(states(graph, requested), run.peak_bytes))
    return result


_PEAK: Final = "peak beyond state"


def profile_text(profile: Profile, width: int | None = None) -> str:
    """Return the profile as plain text, fitted to `width` if given."""
    return plain(profile_table(profile), width)


def profile_table(profile: Profile) -> RenderableType:
    """Return the profile for a rich console: operators, then steps."""
    uniform = [run for run in profile.runs if run.label in profile.precisions] or profile.runs[:1]
    free = _free(profile, uniform)
    left = [Text(f"{many(len(free), 'operator')} more: no time, and nothing kept")] if free else []
    return Group(
        _operators(profile, uniform, free),
        *left,
        _runs(profile),
        *(Text(line) for line in _notes(profile)),
    )


def _free(profile: Profile, uniform: list[MeasuredRun]) -> frozenset[str]:
    """Return the operators without time or saved tensors in every format."""
    dear = {
        measured.operator
        for run in uniform
        for measured in run.operators
        if measured.forward + measured.backward > 0 or _kept(profile, measured)
    }
    return frozenset(measured.operator for measured in uniform[0].operators) - dear


def _kept(profile: Profile, measured: MeasuredOperator) -> Any:
    """Return the bytes that an operator saves for backward."""
    return (
        profile.graph.operator(measured.operator)
        .costs[measured.precision, measured.output]
        .saved_bytes
    )


def _operators(profile: Profile, uniform: list[MeasuredRun], free: frozenset[str]) -> Table:
    first, others = uniform[0], uniform[1:]
    neighbours = [name for run in others for name in (*_columns(profile, run), "wins ms")]
    table = _empty_table("operator", ["share", *_columns(profile, first), *neighbours])
    used = {run.label: {m.operator: m for m in run.operators} for run in uniform}
    for measured in sorted(first.operators, key=lambda m: -(m.forward + m.backward)):
        if measured.operator in free:
            continue
        seconds = measured.forward + measured.backward
        cells = [
            measured.operator,
            f"{seconds / first.passes:.1%}",
            *_cells(profile, first, measured),
        ]
        for run in others:
            other = used[run.label][measured.operator]
            cells += [
                *_cells(profile, run, other),
                milliseconds(seconds - other.forward - other.backward),
            ]
        table.add_row(*map(Text, cells))
    return table


def _columns(profile: Profile, run: MeasuredRun) -> list[str]:
    return [f"{run.label} ms", "keeps", *(["variance"] if _variances(profile, run) else [])]


def _cells(profile: Profile, run: MeasuredRun, measured: MeasuredOperator) -> list[str]:
    variances = _variances(profile, run)
    result = variances.get(measured.operator, {}).get(run.label)
    added = [("" if result is None else f"{result:.2g}")] if variances else []
    return [
        milliseconds(measured.forward + measured.backward),
        short(_kept(profile, measured), "B"),
        *added,
    ]


def _variances(profile: Profile, run: MeasuredRun) -> Mapping[str, Mapping[str, float]]:
    """Return the operators' gradient variances; empty if the run's format has none."""
    available = profile.sensitivity
    return available.variance if available is not None and run.label in available.precisions else {}


def _runs(profile: Profile) -> Table:
    table = _empty_table("plan", ["forward ms", "backward ms", "outside ms", "spread", _PEAK])
    for run in profile.runs:
        cells = (
            run.label,
            milliseconds(run.forward),
            milliseconds(run.backward),
            milliseconds(sum(run.outside)),
            f"{run.spread:.1%}",
            short(run.peak_bytes, "B"),
        )
        table.add_row(*map(Text, cells))
    return table


def _empty_table(name: str, numbers: Sequence[str]) -> Table:
    """Return an empty table whose first column wraps, followed by columns of numbers."""
    table = table_of([name, *numbers], right=numbers)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _notes(profile: Profile) -> list[str]:
    from qsync_fx.profiler.timing.attribution import fitted

    machine = profile.machine
    lines = [f"{profile.model}"]
    if profile.optimizer:
        lines.append(f"optimizer {profile.optimizer}: {milliseconds(profile.optimizer_seconds)} ms")
    lines.append(
        f"{_PEAK}: without parameters, buffers, batch and the optimizer's state, which a replay counts in"
    )
    if profile.loss_memory is None:
        lines.append(
            "loss: what it takes is not known; peaks count the gradients that it gives as held throughout the backward pass"
        )
    for (before, after), line in fitted(profile.runs).items():
        lines.append(
            f"quantizing {before} to {after}: {line.fixed * 1e6:.0f} us and {line.each * 1e12:.0f} ps an element"
        )
    for collective in profile.collectives:
        size, seconds = collective.seconds[-1]
        lines.append(
            f"all-reduce over {collective.backend}, {collective.ranks} ranks: {short(size, 'B')} in {milliseconds(seconds)} ms"
            + (f", of which {collective.busy:.0%} are the processor's" if collective.busy else "")
            + (
                f"; into buckets and out of them at {short(1 / collective.copies, 'B/s')}"
                if collective.copies
                else ""
            )
            + (f"; buffers in {milliseconds(collective.buffers)} ms" if collective.buffers else "")
        )
    threads = many(machine.threads, "thread")
    lines.append(
        f"{machine.device} {machine.name}, {threads}, torch {machine.torch}, qsync_fx {machine.qsync_fx}"
    )
    return lines
