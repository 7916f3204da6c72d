"""Kineto's traces, as `torch.profiler.profile(...).export_chrome_trace` writes them: what ran when, on hosts and devices.

Invariant: events are in the order of their begins, an event before those within it; all times are finite, none is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from qsync_fx.codec import Path
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replay.traces.file import number, read

_DO: Final = "export the trace with torch.profiler.profile(...).export_chrome_trace once profiling has ended"


@dataclass(frozen=True, eq=False)
class Event:
    """A stretch of time on a thread or a stream.

    Attributes:
        name: as the profiler calls it.
        category: "cpu_op", "user_annotation", "kernel" and others.
        track: process and thread, or device and stream.
        begin, end: microseconds.
        args: what else is known of it.
    """

    name: str
    category: str
    track: tuple[str, str]
    begin: float
    end: float
    args: Mapping[str, Any] = field(repr=False)

    def number(self, name: str) -> int | None:
        """Returns a whole number that is known of it; None where there is none."""
        found = number(self.args.get(name))
        return None if found is None else int(found)


@dataclass(frozen=True)
class Kineto:
    """
    Attributes:
        path: of the file.
        rank: of torch.distributed; 0 where there was none.
        ranks: how many there were.
        events: of all threads and streams.
    """

    path: str
    rank: int
    ranks: int
    events: Sequence[Event]


def kineto(path: Path) -> Kineto:
    """Reads a trace, compressed or not; raises `ProfileError` saying what is wrong with it."""
    tree, where = read(path, "trace"), shown(str(path))
    entries = tree.get("traceEvents")
    if not isinstance(entries, list):
        raise ProfileError("the trace has no list of traceEvents", where=where, do=_DO)
    events = [_event(entry, f"{where}, traceEvents[{at}]") for at, entry in enumerate(entries) if _lasts(entry)]
    if not events:
        raise ProfileError(
            "the trace has no event that lasts", where=where, do=f"{_DO}; an unfinished cycle of its schedule is empty"
        )
    _forwards(entries, where)
    group = tree.get("distributedInfo")
    group = group if isinstance(group, dict) else {}
    rank, ranks = number(group.get("rank", 0)), number(group.get("world_size", 1))
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise ProfileError("the trace's rank is not one of its ranks", where=f"{where}, distributedInfo", do=_DO)
    events.sort(key=lambda event: (event.begin, -event.end))
    return Kineto(str(path), int(rank), int(ranks), events)


def outermost(events: Sequence[Event]) -> list[Event]:
    """Returns those events that lie within no other of the same track."""
    until: dict[tuple[str, str], float] = {}
    found = []
    for event in events:
        if event.begin >= until.get(event.track, float("-inf")):
            until[event.track] = event.end
            found.append(event)
    return found


def _lasts(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("ph") == "X" and entry.get("cat") not in ("Trace", "overhead")


def _event(entry: Mapping[str, Any], where: str) -> Event:
    name, args = entry.get("name"), entry.get("args", {})
    begin, duration = number(entry.get("ts")), number(entry.get("dur"))
    if not isinstance(name, str) or not isinstance(args, dict):
        raise ProfileError("the event has no name", where=where, do=_DO)
    if begin is None or duration is None or duration < 0:
        wrong = "ts" if begin is None else "dur"
        what = f"the event {shown(name)} has {wrong} {shown(str(entry.get(wrong)))}, which is no time"
        raise ProfileError(what, where=where, do=_DO)
    track = (str(entry.get("pid")), str(entry.get("tid")))
    return Event(name, str(entry.get("cat", "")), track, begin, begin + duration, args)


def _forwards(entries: Sequence[Any], where: str) -> None:
    """Raises `ProfileError` where a backward pass runs before the forward pass that it belongs to."""
    begun: dict[object, float] = {}
    arrows = [entry for entry in entries if isinstance(entry, dict) and entry.get("cat") == "fwdbwd"]
    for entry in sorted(arrows, key=lambda entry: entry.get("ph") != "s"):
        at, name = number(entry.get("ts")), str(entry.get("id"))
        if at is None:
            raise ProfileError(f"the arrow {shown(name)} has no time", where=where, do=_DO)
        if entry.get("ph") == "s":
            begun[name] = at
        elif at < begun.get(name, at):
            what = (
                f"the trace runs in a circle: backward work {shown(name)} is before the forward work that it belongs to"
            )
            raise ProfileError(what, where=where, do=_DO)
