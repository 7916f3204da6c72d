"""The table of a profile.

Invariant: one operator a line, the dearest first; its time in each format is that of the run in which all operators were planned in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsync_fx.report.numbers import short
from qsync_fx.report.text import plain

if TYPE_CHECKING:
    from qsync_fx.profiling.profile import Profile, Run


def profile_text(profile: Profile, width: int | None = None) -> str:
    """Returns the profile as plain text, fitted to a width where one is given."""
    return plain(profile_table(profile), width)


def profile_table(profile: Profile) -> RenderableType:
    """Returns the profile for a rich console: operators, then whole steps."""
    uniform = [run for run in profile.runs if run.label in profile.precisions] or profile.runs[:1]
    return Group(_operators(profile, uniform), _runs(profile), *(Text(line) for line in _notes(profile)))


def _operators(profile: Profile, uniform: list[Run]) -> Table:
    first, others = uniform[0], uniform[1:]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("operator", overflow="fold")
    for name in ("share", f"{first.label} ms", *(name for run in others for name in (f"{run.label} ms", "wins"))):
        table.add_column(name, justify="right", no_wrap=True)
    taken = {run.label: {m.operator: m.forward + m.backward for m in run.operators} for run in uniform}
    whole = first.forward + first.backward
    for operator in sorted(taken[first.label], key=lambda name: -taken[first.label][name]):
        before = taken[first.label][operator]
        cells = [operator, f"{before / whole:.1%}", _milliseconds(before)]
        for run in others:
            after = taken[run.label][operator]
            cells += [_milliseconds(after), _milliseconds(before - after)]
        table.add_row(*map(Text, cells))
    return table


def _runs(profile: Profile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for name in ("forward ms", "backward ms", "outside ms", "spread", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in profile.runs:
        cells = (
            run.label,
            _milliseconds(run.forward),
            _milliseconds(run.backward),
            _milliseconds(sum(run.outside)),
            f"{run.spread:.1%}",
            short(run.peak_bytes, "B"),
        )
        table.add_row(*map(Text, cells))
    return table


def _notes(profile: Profile) -> list[str]:
    from qsync_fx.profiling.quantizing import fitted

    machine = profile.machine
    lines = [f"{profile.model}"]
    if profile.optimizer:
        lines.append(f"optimizer {profile.optimizer}: {_milliseconds(profile.optimizer_seconds)} ms")
    for (before, after), line in fitted(profile.runs).items():
        lines.append(
            f"quantizing {before} to {after}: {line.fixed * 1e6:.0f} us and {line.each * 1e12:.0f} ps an element"
        )
    for collective in profile.collectives:
        size, seconds = collective.seconds[-1]
        lines.append(
            f"all-reduce over {collective.backend}, {collective.ranks} ranks: {short(size, 'B')} in {_milliseconds(seconds)} ms"
        )
    threads = f"{machine.threads} thread{'s' * (machine.threads != 1)}"
    lines.append(f"{machine.device} {machine.name}, {threads}, torch {machine.torch}, qsync_fx {machine.qsync_fx}")
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
