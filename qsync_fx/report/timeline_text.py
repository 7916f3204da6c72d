"""What `print(timeline)` shows: the step, each class of devices, and the operators that take longest.

Invariant: seconds of a device are of one of its devices, and add up as `timeline` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.report.fitted import Fitted
from qsync_fx.report.numbers import duration, many, short
from qsync_fx.report.text import plain, table_of

if TYPE_CHECKING:
    from qsync_fx.timeline.timeline import OperatorSeconds, Timeline

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
    taken = [Text(f"{name}: measured with {found}") for name, found in timeline.conditions.items()]
    tables = (_devices(timeline, operators), _operators(timeline, operators[:shown]))
    return Group(Text(_head(timeline)), *tables, *more, *taken)


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
        parts.append(f"sent{between} as {short(sum(bucket.travelling for bucket in buckets), 'B')} ({kinds})")
    return ", ".join(parts)


def _devices(timeline: Timeline, operators: Sequence[OperatorSeconds]) -> RenderableType:
    cluster, sending, waiting = timeline.played.cluster, timeline.sending, timeline.waiting
    parts = ("forward", "backward", "casts", "other")
    columns = ["devices", "count", *parts, "sending", "waiting", "optimizer"]
    table = table_of([*columns, *(["peak"] if timeline.peak_bytes else [])], right=(*columns[1:], "peak"))
    for name, device in cluster.devices.items():
        own = [one for one in operators if one.device == name]
        sums = [sum(getattr(one, part) for one in own) for part in parts]
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
    for one in operators:
        share = one.seconds / timeline.seconds if timeline.seconds else 0.0
        times = (one.forward + one.other, one.backward, one.casts)
        device = [Text(one.device)] if several else []
        table.add_row(Text(one.operator or "(outside operators)"), *device, *map(duration, times), f"{share:.1%}")
    return table
