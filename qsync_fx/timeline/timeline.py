"""Timeline of a replayed step, its text, and its export for Perfetto and Chrome.

The export has the JSON of the Trace Event Format: a process for each device class, with a track for
computation and one for communication. Forward, backward, casts, other, waiting, sending
and optimizer of a device add up to the step, except for launch overhead and slowdown by overlap.
"""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.formatting import duration, many, short
from qsync_fx.html_view import HtmlView
from qsync_fx.predictor.cost_mapper.times import Part
from qsync_fx.predictor.replayer.cluster_step import SimulatedBucket, SimulatedStep
from qsync_fx.serialization.atomic_files import write_text
from qsync_fx.serialization.schema import Path
from qsync_fx.text_tables import Fitted, plain, table_of


@dataclass(frozen=True)
class OperatorSeconds:
    """Seconds of an operator in a step of one device.

    Attributes:
        device: device class.
        operator: its id; "" for time outside operators.
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
    """Piece of a device's track, from `begin` to `end` in seconds.

    `kind` is "forward", "backward", "cast", "outside", "optimizer", "waiting" or "sending".
    """

    name: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline(HtmlView):
    """Timeline of one training step.

    Attributes:
        played: replayed step.
        peak_bytes: peak memory by device class, predicted from model and plan alone, without
            measured corrections (`qsync docs memory` has the accuracy); empty if unknown.
        conditions: by device class, non-default conditions of the profile's measurement, in words:
            backend options, and modules in evaluation mode. Times are valid under these conditions.
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
        samples = self.played.cluster.samples
        return samples / self.seconds if samples and self.seconds else None

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
        names = enumerate(self.played.devices)
        return {name: tuple(self._computing(index, name)) for index, name in names}

    @cached_property
    def communicating(self) -> Mapping[str, tuple[TimelinePiece, ...]]:
        """Pieces of each class's communication track in order, waiting included."""
        names = enumerate(self.played.devices)
        return {name: tuple(self._communicating(index)) for index, name in names}

    def save_perfetto(self, path: Path) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing; raise `QSyncError` on error."""
        write_text(pathlib.Path(path), json.dumps(trace(self), allow_nan=False) + "\n")

    def __repr__(self) -> str:
        """Return a one-line summary for notebooks and debuggers."""
        devices = self.played.cluster.devices.items()
        counts = ", ".join(f"{device.count} {name}" for name, device in devices)
        return f"Timeline({duration(self.seconds)} per step on {counts})"

    def __str__(self) -> str:
        return plain(timeline_table(self))

    def _standing(self, kind: str) -> Mapping[str, float]:
        return {
            name: sum((piece.end - piece.begin for piece in pieces if piece.kind == kind), 0.0)
            for name, pieces in self.computing.items()
        }

    def _computing(self, index: int, name: str) -> Iterator[TimelinePiece]:
        alone, step = self.played.devices[name], self.played.step
        ends = alone.ends + step.begins[index]
        begin, end = (ends - alone.seconds).tolist(), ends.tolist()
        for entry, since, until in zip(alone.entries, begin, end, strict=True):
            label = entry.operator or _WITHOUT[entry.part]
            yield TimelinePiece(label, str(entry.part), since, until)
        last = float(step.computed[index])
        transfers = zip(step.sent.tolist(), step.arrived.tolist(), strict=True)
        for bucket, (sent, arrived) in zip(self.played.buckets, transfers, strict=True):
            if sent > last:
                yield TimelinePiece(_OTHERS, "waiting", last, sent)
            start = max(sent, last)
            if arrived > start:
                yield TimelinePiece(f"waiting for {_name(bucket)}", "sending", start, arrived)
            last = max(last, arrived)
        copied = last + self.played.returned(name)
        if copied > last:
            yield TimelinePiece("copy of gradients from buckets", "outside", last, copied)
        yield TimelinePiece("optimizer", "optimizer", copied, copied + alone.optimizer)

    def _communicating(self, index: int) -> Iterator[TimelinePiece]:
        step, last = self.played.step, 0.0
        moments = zip(step.ready[index], step.sent, step.arrived, strict=True)
        for bucket, times in zip(self.played.buckets, moments, strict=True):
            ready, sent, arrived = map(float, times)
            if sent > max(ready, last):
                yield TimelinePiece(_OTHERS, "waiting", max(ready, last), sent)
            yield TimelinePiece(_name(bucket), "sending", sent, arrived)
            last = arrived


_OTHERS: Final = "waiting for other devices"
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


def timeline_table(timeline: Timeline, shown: int = SHOWN) -> RenderableType:
    """Return the timeline for a rich console, with the `shown` longest operators."""
    operators = timeline.by_operator()
    parts = [
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
        nbytes = short(sum(bucket.nbytes for bucket in buckets), "B")
        parts.append(f"{nbytes} of gradients in {many(len(buckets), 'bucket')}")
    codecs = Counter(bucket.coded.codec for bucket in buckets if bucket.coded is not None)
    if codecs:
        kinds = ", ".join(f"{count} in {codec}" for codec, count in sorted(codecs.items()))
        several = timeline.played.cluster.nodes < timeline.played.cluster.ranks
        sent = "sent between nodes" if several else "sent"
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
    text = short(peak, "B")
    if memory is None:
        return text
    text += f" of {short(memory, 'B')}"
    return f"{text}, exceeded" if peak > memory else text


def _operators(timeline: Timeline, operators: Sequence[OperatorSeconds]) -> RenderableType:
    columns = ("forward", "backward", "casts", "share")
    labels = ["operator"]
    if len(timeline.played.devices) > 1:
        labels.append("devices")
    table = table_of([*labels, *columns], right=columns)
    for item in operators:
        share = item.seconds / (timeline.seconds or 1.0)
        times = (item.forward + item.other, item.backward, item.casts)
        cells = [Text(item.operator or "(outside operators)"), Text(item.device)][: len(labels)]
        table.add_row(*cells, *map(duration, times), f"{share:.1%}")
    return table


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as an object of the Trace Event Format; times are microseconds."""
    events: list[dict[str, Any]] = []

    def label(kind: str, pid: int, tid: int, **args: Any) -> None:
        events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    # Tools for Linux treat process 0 as the idle process.
    for pid, (name, device) in enumerate(timeline.played.cluster.devices.items(), start=1):
        title = f"{name} ({device.count} devices)" if device.count > 1 else name
        label("process_name", pid, 0, name=title)
        label("process_sort_index", pid, 0, sort_index=pid)
        tracks = timeline.computing[name], timeline.communicating[name]
        for tid, pieces in enumerate(tracks, start=1):
            label("thread_name", pid, tid, name=("computation", "communication")[tid - 1])
            label("thread_sort_index", pid, tid, sort_index=tid)
            for piece in pieces:
                begin, length = piece.begin * 1e6, (piece.end - piece.begin) * 1e6
                where = {"pid": pid, "tid": tid, "ts": begin, "dur": length}
                events.append({"ph": "X", "name": piece.name, "cat": piece.kind, **where})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"seconds": timeline.seconds},
        "traceEvents": events,
    }
