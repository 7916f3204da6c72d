"""A replayed step, as users look at it.

Invariant: of each device, forward and backward pass, casts and the rest, waiting, sending and the optimizer add up to the step, but for
what the host takes to hand work over and what communication slows down.

What `print(timeline)` shows: the step, each class of devices, and the operators that take longest.

Invariant: seconds of a device are of one of its devices, and add up as `timeline` says.

Timelines as JSON of the Trace Event Format, which Perfetto and Chrome show: a process a class of devices, with a track for what it
computes and one for what it sends.

Waiting is shown on both tracks. An arrow leads from the entry after which a bucket is ready to where it travels.

Invariant: times are microseconds from the begin of the step, and pieces of one track do not overlap.
"""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.errors import ProfileError, QSyncError
from qsync_fx.formatting import duration, many, short
from qsync_fx.predictor.replayer.cluster_step import SimulatedBucket, SimulatedStep
from qsync_fx.predictor.times import Part
from qsync_fx.serialization.atomic_files import write_text
from qsync_fx.serialization.schema import Path
from qsync_fx.text_tables import Fitted, plain, table_of


@dataclass(frozen=True)
class OperatorSeconds:
    """What an operator takes of a step of one device.

    Attributes:
        device: the class of devices.
        operator: its id; "" for what belongs to none.
        forward, backward: seconds of the operator itself.
        casts: seconds of conversions and quantizers in front of it, and of what differentiates them.
        other: seconds of the framework.
    """

    device: str
    operator: str
    forward: float = 0.0
    backward: float = 0.0
    casts: float = 0.0
    other: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.casts + self.other


@dataclass(frozen=True)
class TimelinePiece:
    """A stretch of time on a track of a device.

    Attributes:
        name: what happens.
        kind: "forward", "backward", "cast", "outside", "optimizer", "waiting" or "sending".
        begin, end: seconds.
    """

    name: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """
    Attributes:
        played: what was replayed.
        peak_bytes: by class of devices, what a step holds at most, as `qsync_fx.predictor.memory` foresees it from the model and the plan
            alone, uncorrected by what a profile measured (docs/predictor.md says how near); empty while that is not known.
        conditions: by class of devices, in words, what was not as by default when its profile was taken: options of the backend, and
            modules in the mode to evaluate. Times hold under these conditions alone.
    """

    played: SimulatedStep
    peak_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    conditions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def seconds(self) -> float:
        """Seconds from one step to the next."""
        return float(self.played.step.seconds)

    @property
    def throughput(self) -> float | None:
        """Samples a second of the whole cluster; None where the batch of a device is not known."""
        devices = self.played.cluster.devices.values()
        batches = [item.batch * item.count for item in devices if item.batch is not None]
        return (
            sum(batches) / self.seconds if len(batches) == len(devices) and self.seconds else None
        )

    @property
    def waiting(self) -> Mapping[str, float]:
        """Seconds of a step in which a device of each class does nothing because others are not ready to send."""
        return self._standing("waiting")

    @property
    def sending(self) -> Mapping[str, float]:
        """Seconds of a step in which a device of each class does nothing because gradients travel."""
        return self._standing("sending")

    def by_operator(self) -> tuple[OperatorSeconds, ...]:
        """Returns what each operator takes on each class of devices, the longest first."""
        result: list[OperatorSeconds] = []
        for device, alone in self.played.devices.items():
            sums: dict[str, dict[Part, float]] = {}
            for entry, seconds in zip(alone.entries, alone.seconds.tolist(), strict=True):
                parts = sums.setdefault(entry.operator, {})
                parts[entry.part] = parts.get(entry.part, 0.0) + seconds
            result += [
                OperatorSeconds(device, operator, *(parts.get(part, 0.0) for part in Part))
                for operator, parts in sums.items()
            ]
        return tuple(sorted(result, key=lambda item: -item.seconds))

    @cached_property
    def computing(self) -> Mapping[str, tuple[TimelinePiece, ...]]:
        """What the stream of computation of each class does, in order, waiting included."""
        return {
            name: tuple(self._computing(index, name))
            for index, name in enumerate(self.played.devices)
        }

    @cached_property
    def communicating(self) -> Mapping[str, tuple[TimelinePiece, ...]]:
        """What the stream of communication of each class does, in order, waiting included."""
        return {
            name: tuple(self._communicating(index))
            for index, name in enumerate(self.played.devices)
        }

    def save_perfetto(self, path: Path) -> None:
        """Writes the timeline for ui.perfetto.dev and chrome://tracing; raises `ProfileError` if it cannot."""

        save(self, path)

    def __repr__(self) -> str:
        """One line, as notebooks and debuggers show it."""
        from qsync_fx.formatting import duration

        devices = ", ".join(
            f"{device.count} {name}" for name, device in self.played.cluster.devices.items()
        )
        return f"Timeline({duration(self.seconds)} a step on {devices})"

    def __str__(self) -> str:

        return timeline_text(self)

    def _standing(self, kind: str) -> Mapping[str, float]:
        return {
            name: sum((piece.end - piece.begin for piece in pieces if piece.kind == kind), 0.0)
            for name, pieces in self.computing.items()
        }

    def _computing(self, index: int, name: str) -> list[TimelinePiece]:
        alone, step = self.played.devices[name], self.played.step
        begin, end = (
            step.moments(index, clock).tolist()
            for clock in (alone.ends - alone.seconds, alone.ends)
        )
        pieces = [
            TimelinePiece(entry.operator or _WITHOUT[entry.part], str(entry.part), since, until)
            for entry, since, until in zip(alone.entries, begin, end, strict=True)
        ]
        last = float(step.computed[index])
        for bucket, sent, arrived in zip(
            self.played.buckets, step.sent.tolist(), step.arrived.tolist(), strict=True
        ):
            if sent > last:
                pieces.append(TimelinePiece("waiting for others", "waiting", last, sent))
            if arrived > max(sent, last):
                pieces.append(
                    TimelinePiece(
                        f"waiting for {_name(bucket)}", "sending", max(sent, last), arrived
                    )
                )
            last = max(last, arrived)
        copied = self.played.returned(name)
        if copied:
            pieces.append(
                TimelinePiece("gradients out of their buckets", "outside", last, last + copied)
            )
        return [
            *pieces,
            TimelinePiece("optimizer", "optimizer", last + copied, last + copied + alone.optimizer),
        ]

    def _communicating(self, index: int) -> list[TimelinePiece]:
        step, pieces, last = self.played.step, [], 0.0
        moments = zip(
            step.ready[index].tolist(), step.sent.tolist(), step.arrived.tolist(), strict=True
        )
        for bucket, (ready, sent, arrived) in zip(self.played.buckets, moments, strict=True):
            if sent > max(ready, last):
                pieces.append(
                    TimelinePiece("waiting for others", "waiting", max(ready, last), sent)
                )
            pieces.append(TimelinePiece(_name(bucket), "sending", sent, arrived))
            last = arrived
        return pieces


_WITHOUT = {
    Part.FORWARD: "forward",
    Part.BACKWARD: "backward",
    Part.CAST: "cast",
    Part.OUTSIDE: "framework",
}


def _name(bucket: SimulatedBucket) -> str:
    more = len(bucket.parameters) - 1
    return f"{bucket.parameters[0]}{f' and {more} more' if more else ''}"


SHOWN = 15
"""How many operators a table has where nobody says it."""


def timeline_text(timeline: Timeline, width: int | None = None) -> str:
    """Returns a timeline as plain text, fitted to a width where one is given."""
    return plain(timeline_table(timeline), width)


def timeline_table(timeline: Timeline, shown: int = SHOWN) -> RenderableType:
    """Returns a timeline for a rich console, with so many operators."""
    operators = timeline.by_operator()
    left = len(operators) - shown
    more = [Text(many(left, "more operator"))] if left > 0 else []
    used = [Text(f"{name}: measured with {item}") for name, item in timeline.conditions.items()]
    tables = (_devices(timeline, operators), _operators(timeline, operators[:shown]))
    return Group(Text(_head(timeline)), *tables, *more, *used)


def _head(timeline: Timeline) -> str:
    parts = [f"{duration(timeline.seconds)} a step"]
    if timeline.seconds:
        parts.append(f"{1 / timeline.seconds:.4g} steps a second")
    if timeline.throughput is not None:
        parts.append(f"{timeline.throughput:.4g} samples a second")
    buckets = timeline.played.buckets
    if buckets:
        parts.append(
            f"{many(len(buckets), 'bucket')} of {short(sum(bucket.nbytes for bucket in buckets), 'B')} gradients"
        )
    codecs = Counter(bucket.coded.codec for bucket in buckets if bucket.coded is not None)
    if codecs:
        kinds = ", ".join(f"{count} in {codec}" for codec, count in sorted(codecs.items()))
        between = " between nodes" if timeline.played.cluster.nodes.ranks > 1 else ""
        parts.append(
            f"sent{between} as {short(sum(bucket.travelling for bucket in buckets), 'B')} ({kinds})"
        )
    return ", ".join(parts)


def _devices(timeline: Timeline, operators: Sequence[OperatorSeconds]) -> RenderableType:
    cluster, sending, waiting = timeline.played.cluster, timeline.sending, timeline.waiting
    parts = ("forward", "backward", "casts", "other")
    columns = ["devices", "count", *parts, "sending", "waiting", "optimizer"]
    table = table_of(
        [*columns, *(["peak"] if timeline.peak_bytes else [])], right=(*columns[1:], "peak")
    )
    for name, device in cluster.devices.items():
        owned = [item for item in operators if item.device == name]
        sums = [sum(getattr(item, part) for item in owned) for part in parts]
        times = [*sums, sending[name], waiting[name], timeline.played.devices[name].optimizer]
        peak = [_peak(timeline, name)] if timeline.peak_bytes else []
        table.add_row(Text(name), str(device.count), *map(duration, times), *peak)
    return Fitted(table)


def _peak(timeline: Timeline, name: str) -> str:
    cluster, peak = timeline.played.cluster, timeline.peak_bytes.get(name)
    memory = cluster.bytes_of(name, cluster.devices[name].memory or 0)
    if peak is None:
        return "?"
    if memory is None:
        return short(peak, "B")
    return f"{short(peak, 'B')} of {short(memory, 'B')}{', too much' if peak > memory else ''}"


def _operators(timeline: Timeline, operators: Sequence[OperatorSeconds]) -> RenderableType:
    several = len(timeline.played.devices) > 1
    columns = ("forward", "backward", "casts", "share")
    table = table_of(["operator", *(["devices"] if several else []), *columns], right=columns)
    for item in operators:
        share = item.seconds / timeline.seconds if timeline.seconds else 0.0
        times = (item.forward + item.other, item.backward, item.casts)
        device = [Text(item.device)] if several else []
        table.add_row(
            Text(item.operator or "(outside operators)"),
            *device,
            *map(duration, times),
            f"{share:.1%}",
        )
    return table


_COLORS = {
    "forward": "thread_state_running",
    "backward": "rail_animation",
    "cast": "rail_load",
    "outside": "generic_work",
    "optimizer": "rail_response",
    "waiting": "terrible",
    "sending": "thread_state_iowait",
}
"""Names that the format reserves; Perfetto colours by name where it does not know them."""


def save(timeline: Timeline, path: Path) -> None:
    """Writes a timeline; raises `ProfileError` where that fails."""
    try:
        write_text(pathlib.Path(path), json.dumps(trace(timeline), allow_nan=False) + "\n")
    except QSyncError as error:
        raise ProfileError(
            f"the timeline is not saved: {error.what}", where=error.where, do=error.do
        ) from error


def trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the object of the format."""
    events: list[dict[str, Any]] = []
    # Process 0 is the idle one to tools that know Linux.
    for index, (name, device) in enumerate(timeline.played.cluster.devices.items(), start=1):
        title = f"{name} ({device.count} devices)" if device.count > 1 else name
        events.append(
            {"ph": "M", "name": "process_name", "pid": index, "tid": 0, "args": {"name": title}}
        )
        events.append(
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": index,
                "tid": 0,
                "args": {"sort_index": index},
            }
        )
        tracks = {
            "computation": timeline.computing[name],
            "communication": timeline.communicating[name],
        }
        for tid, (track, pieces) in enumerate(tracks.items(), start=1):
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": index,
                    "tid": tid,
                    "args": {"name": track},
                }
            )
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": index,
                    "tid": tid,
                    "args": {"sort_index": tid},
                }
            )
            events += [_slice(piece, index, tid) for piece in pieces]
        events += _arrows(timeline, name, index)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"seconds": timeline.seconds},
        "traceEvents": events,
    }


def _slice(piece: TimelinePiece, pid: int, tid: int) -> dict[str, Any]:
    begin, end = piece.begin * 1e6, piece.end * 1e6
    return {
        "ph": "X",
        "name": piece.name,
        "cat": piece.kind,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "cname": _COLORS[piece.kind],
    }


def _arrows(timeline: Timeline, name: str, pid: int) -> list[dict[str, Any]]:
    step, pieces = timeline.played.step, timeline.computing[name]
    events: list[dict[str, Any]] = []
    for number, (ready, sent) in enumerate(
        zip(step.ready[pid - 1].tolist(), step.sent.tolist(), strict=True)
    ):
        # An arrow belongs to the slice that its time lies within, and a bucket is ready when one ends.
        made_by = max(
            (piece for piece in pieces if piece.begin < ready),
            key=lambda piece: piece.begin,
            default=None,
        )
        if made_by is None:
            continue
        same = {"cat": "ready", "name": "ready", "id": f"{name} {number}", "pid": pid}
        events.append({"ph": "s", **same, "tid": 1, "ts": (made_by.begin + made_by.end) / 2 * 1e6})
        events.append({"ph": "f", "bp": "e", **same, "tid": 2, "ts": sent * 1e6})
    return events
