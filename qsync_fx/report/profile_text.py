"""The table of a profile.

Invariant: one operator a line, the dearest first; its time in each format is that of the run in which all operators were planned in it.
Those that take no time and keep nothing in any of them, as views do, are counted alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsync_fx.report.numbers import many, milliseconds, short
from qsync_fx.report.text import plain, table_of

if TYPE_CHECKING:
    from qsync_fx.profiling.profile import Profile
    from qsync_fx.profiling.runs import Measured, Run


_PEAK: Final = "peak beyond state"


def profile_text(profile: Profile, width: int | None = None) -> str:
    """Returns the profile as plain text, fitted to a width where one is given."""
    return plain(profile_table(profile), width)


def profile_table(profile: Profile) -> RenderableType:
    """Returns the profile for a rich console: operators, then whole steps."""
    uniform = [run for run in profile.runs if run.label in profile.precisions] or profile.runs[:1]
    free = _free(profile, uniform)
    left = [Text(f"{many(len(free), 'operator')} more: no time, and nothing kept")] if free else []
    return Group(_operators(profile, uniform, free), *left, _runs(profile), *(Text(line) for line in _notes(profile)))


def _free(profile: Profile, uniform: list[Run]) -> frozenset[str]:
    """Returns the operators that cost nothing in any format."""
    dear = {
        measured.operator
        for run in uniform
        for measured in run.operators
        if measured.forward + measured.backward > 0 or _kept(profile, measured)
    }
    return frozenset(measured.operator for measured in uniform[0].operators) - dear


def _kept(profile: Profile, measured: Measured) -> Any:
    """What an operator keeps for its backward pass, in bytes."""
    return profile.graph.operator(measured.operator).costs[measured.precision, measured.output].saved_bytes


def _operators(profile: Profile, uniform: list[Run], free: frozenset[str]) -> Table:
    first, others = uniform[0], uniform[1:]
    beside = [name for run in others for name in (*_columns(profile, run), "wins ms")]
    table = _table("operator", ["share", *_columns(profile, first), *beside])
    taken = {run.label: {m.operator: m for m in run.operators} for run in uniform}
    for measured in sorted(first.operators, key=lambda m: -(m.forward + m.backward)):
        if measured.operator in free:
            continue
        seconds = measured.forward + measured.backward
        cells = [measured.operator, f"{seconds / first.passes:.1%}", *_cells(profile, first, measured)]
        for run in others:
            other = taken[run.label][measured.operator]
            cells += [*_cells(profile, run, other), milliseconds(seconds - other.forward - other.backward)]
        table.add_row(*map(Text, cells))
    return table


def _columns(profile: Profile, run: Run) -> list[str]:
    return [f"{run.label} ms", "keeps", *(["variance"] if _variances(profile, run) else [])]


def _cells(profile: Profile, run: Run, measured: Measured) -> list[str]:
    variances = _variances(profile, run)
    found = variances.get(measured.operator, {}).get(run.label)
    added = [("" if found is None else f"{found:.2g}")] if variances else []
    return [milliseconds(measured.forward + measured.backward), short(_kept(profile, measured), "B"), *added]


def _variances(profile: Profile, run: Run) -> Mapping[str, Mapping[str, float]]:
    """What operators add to the variance of the gradients, where any does in the format of a run."""
    known = profile.sensitivity
    return known.variance if known is not None and run.label in known.precisions else {}


def _runs(profile: Profile) -> Table:
    table = _table("plan", ["forward ms", "backward ms", "outside ms", "spread", _PEAK])
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


def _table(name: str, numbers: Sequence[str]) -> Table:
    """Returns an empty table whose first column wraps, before those of numbers."""
    table = table_of([name, *numbers], right=numbers)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _notes(profile: Profile) -> list[str]:
    from qsync_fx.profiling.measuring.quantizing import fitted

    machine = profile.machine
    lines = [f"{profile.model}"]
    if profile.optimizer:
        lines.append(f"optimizer {profile.optimizer}: {milliseconds(profile.optimizer_seconds)} ms")
    lines.append(f"{_PEAK}: without parameters, buffers, batch and the optimizer's state, which a replay counts in")
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
            + (f"; into buckets and out of them at {short(1 / collective.copies, 'B/s')}" if collective.copies else "")
            + (f"; buffers in {milliseconds(collective.buffers)} ms" if collective.buffers else "")
        )
    threads = many(machine.threads, "thread")
    lines.append(f"{machine.device} {machine.name}, {threads}, torch {machine.torch}, qsync_fx {machine.qsync_fx}")
    return lines
