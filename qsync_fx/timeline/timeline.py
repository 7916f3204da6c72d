"""Timeline of a replayed step, its text, and its export for Perfetto and Chrome.

The export (`save`) has the JSON of the Trace Event Format: a process for each device class, with a
track for computation and one for communication. Forward, backward, casts, other, waiting, sending
and optimizer of a device add up to the step, except for launch overhead and slowdown by overlap.
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
    """Seconds of an operator in a step of one device.

    Attributes:
        device: device class.
        operator: its id; "" for time outside operators.
        forward, backward: seconds of the operator itself.
        casts: seconds of the casts and quantizers of its inputs, and of their backward.
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
        return self.forward + self.backward + self.casts + self.other


@dataclass(frozen=True)
class TimelinePiece:
    """Piece of a device's track.

    Attributes:
        name: its label.
        kind: "forward", "backward", "cast", "outside", "optimizer", "waiting" or "sending".
        begin, end: seconds.
    """

    name: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Timeline of one training step.

    Attributes:
        played: replayed step.
        peak_bytes: peak memory by device class, predicted by `qsync_fx.predictor.memory` from model
            and plan alone, without measured corrections (docs/predictor.md has the accuracy); empty
            if unknown.
        conditions: by device class, non-default conditions of the profile's measurement, in words:
            backend options, and modules in evaluation mode. Times are valid under these conditions
            only.
    """

    played: SimulatedStep
    peak_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    conditions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def seconds(self) -> float:
        """Step time in seconds."""
        return float(self.played.step.seconds)

    @property
    def throughput(self) -> float | None:
        """Samples/s of the cluster; None if the batch of a device is unknown."""
        devices = self.played.cluster.devices.values()
        batches = [item.batch * item.count for item in devices if item.batch is not None]
        if len(batches) < len(devices) or not self.seconds:
            return None
        return sum(batches) / self.seconds

    @property
    def waiting(self) -> Mapping[str, float]:
        """Idle seconds of each device class while other devices are not ready to send."""
        return self._standing("waiting")

    @property
    def sending(self) -> Mapping[str, float]:
        """Idle seconds of each device class during transfers of gradients."""
        return self._standing("sending")

    def by_operator(self) -> tuple[OperatorSeconds, ...]:
        """Return the seconds of each operator on each device class, longest first."""
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
        """Pieces of each class's computation track in order, waiting included."""
        return {
            name: tuple(self._computing(index, name))
            for index, name in enumerate(self.played.devices)
        }

    @cached_property
    def communicating(self) -> Mapping[str, tuple[TimelinePiece, ...]]:
        """Pieces of each class's communication track in order, waiting included."""
        return {
            name: tuple(self._communicating(index))
            for index, name in enumerate(self.played.devices)
        }

    def save_perfetto(self, path: Path) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing; raise `ProfileError` on error."""
        save(self, path)

    def __repr__(self) -> str:
        """Return a one-line summary for notebooks and debuggers."""

        devices = ", ".join(
            f"{device.count} {name}" for name, device in self.played.cluster.devices.items()
        )
        return f"Timeline({duration(self.seconds)} per step on {devices})"

    def __str__(self) -> str:
        return timeline_text(self)

    def _standing(self, kind: str) -> Mapping[str, float]:
        return {
            name: sum((piece.end - piece.begin for piece in pieces if piece.kind == kind), 0.0)
            for name, pieces in self.computing.items()
        }

    def _computing(self, index: int, name: str) -> list[TimelinePiece]:
        alone, step = self.played.devices[name], self.played.step
        ends = alone.ends + step.begins[index]
        begin, end = (ends - alone.seconds).tolist(), ends.tolist()
        pieces = [
            TimelinePiece(entry.operator or _WITHOUT[entry.part], str(entry.part), since, until)
            for entry, since, until in zip(alone.entries, begin, end, strict=True)
        ]
        last = float(step.computed[index])
        for bucket, sent, arrived in zip(
            self.played.buckets, step.sent.tolist(), step.arrived.tolist(), strict=True
        ):
            if sent > last:
                pieces.append(TimelinePiece("waiting for other devices", "waiting", last, sent))
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
                TimelinePiece("copy of gradients from buckets", "outside", last, last + copied)
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
                    TimelinePiece("waiting for other devices", "waiting", max(ready, last), sent)
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
    first, *others = bucket.parameters
    return f"{first} and {len(others)} more" if others else first


SHOWN = 15
"""Default number of operators in the table."""


def timeline_text(timeline: Timeline, width: int | None = None) -> str:
    """Return the timeline as plain text, fitted to `width` if given."""
    return plain(timeline_table(timeline), width)


def timeline_table(timeline: Timeline, shown: int = SHOWN) -> RenderableType:
    """Return the timeline for a rich console, with the `shown` longest operators."""
    operators = timeline.by_operator()
    parts: list[RenderableType] = [
        Text(_head(timeline)),
        _devices(timeline, operators),
        _operators(timeline, operators[:shown]),
    ]
    if len(operators) > shown:
        parts.append(Text(many(len(operators) - shown, "more operator")))
    parts += [Text(f"{name}: measured with {item}") for name, item in timeline.conditions.items()]
    return Group(*parts)


def _head(timeline: Timeline) -> str:
    parts = [f"{duration(timeline.seconds)} per step"]
    if timeline.seconds:
        parts.append(f"{1 / timeline.seconds:.4g} steps per second")
    if timeline.throughput is not None:
        parts.append(f"{timeline.throughput:.4g} samples per second")
    buckets = timeline.played.buckets
    if buckets:
        parts.append(
            f"{short(sum(bucket.nbytes for bucket in buckets), 'B')} of gradients in "
            f"{many(len(buckets), 'bucket')}"
        )
    codecs = Counter(bucket.coded.codec for bucket in buckets if bucket.coded is not None)
    if codecs:
        kinds = ", ".join(f"{count} in {codec}" for codec, count in sorted(codecs.items()))
        sent = "sent"
        if timeline.played.cluster.nodes.ranks > 1:
            sent = "sent between nodes"
        nbytes = short(sum(bucket.travelling for bucket in buckets), "B")
        parts.append(f"{sent} as {nbytes} ({kinds})")
    return ", ".join(parts)


def _devices(timeline: Timeline, operators: Sequence[OperatorSeconds]) -> RenderableType:
    cluster, sending, waiting = timeline.played.cluster, timeline.sending, timeline.waiting
    parts = ("forward", "backward", "casts", "other")
    columns = ["devices", "count", *parts, "sending", "waiting", "optimizer"]
    if timeline.peak_bytes:
        columns.append("peak")
    table = table_of(columns, right=columns[1:])
    for name, device in cluster.devices.items():
        owned = [item for item in operators if item.device == name]
        sums = [sum(getattr(item, part) for item in owned) for part in parts]
        times = [*sums, sending[name], waiting[name], timeline.played.devices[name].optimizer]
        cells = [str(device.count), *map(duration, times)]
        if timeline.peak_bytes:
            cells.append(_peak(timeline, name))
        table.add_row(Text(name), *cells)
    return Fitted(table)


def _peak(timeline: Timeline, name: str) -> str:
    cluster, peak = timeline.played.cluster, timeline.peak_bytes.get(name)
    memory = cluster.bytes_of(name, cluster.devices[name].memory or 0)
    if peak is None:
        return "?"
    if memory is None:
        return short(peak, "B")
    text = f"{short(peak, 'B')} of {short(memory, 'B')}"
    return f"{text}, exceeded" if peak > memory else text


def _operators(timeline: Timeline, operators: Sequence[OperatorSeconds]) -> RenderableType:
    columns = ("forward", "backward", "casts", "share")
    labels = ["operator"]
    if len(timeline.played.devices) > 1:
        labels.append("devices")
    table = table_of([*labels, *columns], right=columns)
    for item in operators:
        share = item.seconds / timeline.seconds if timeline.seconds else 0.0
        times = (item.forward + item.other, item.backward, item.casts)
        cells = [Text(item.operator or "(outside operators)"), Text(item.device)][: len(labels)]
        table.add_row(*cells, *map(duration, times), f"{share:.1%}")
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
"""Reserved color names of the format; Perfetto picks a color by slice name for unknown ones."""


def save(timeline: Timeline, path: Path) -> None:
    """Write the timeline as a trace; raise `ProfileError` on failure."""
    try:
        write_text(pathlib.Path(path), json.dumps(trace(timeline), allow_nan=False) + "\n")
    except QSyncError as error:
        raise ProfileError(
            f"the timeline cannot be saved: {error.what}", where=error.where, do=error.do
        ) from error


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as an object of the Trace Event Format; times are microseconds."""
    events: list[dict[str, Any]] = []
    # Tools for Linux treat process 0 as the idle process.
    for index, (name, device) in enumerate(timeline.played.cluster.devices.items(), start=1):
        title = f"{name} ({device.count} devices)" if device.count > 1 else name
        events.append(_metadata("process_name", index, 0, name=title))
        events.append(_metadata("process_sort_index", index, 0, sort_index=index))
        tracks = {
            "computation": timeline.computing[name],
            "communication": timeline.communicating[name],
        }
        for tid, (track, pieces) in enumerate(tracks.items(), start=1):
            events.append(_metadata("thread_name", index, tid, name=track))
            events.append(_metadata("thread_sort_index", index, tid, sort_index=tid))
            events += [_slice(piece, index, tid) for piece in pieces]
        events += _arrows(timeline, name, index)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"seconds": timeline.seconds},
        "traceEvents": events,
    }


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


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
        # An arrow binds to the slice that encloses its time, but a bucket is ready when a slice
        # ends.
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
