"""Timeline tab: the tracks of each device class in a step, one variant per plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsync_fx.formatting import duration
from qsync_fx.timeline.timeline import Timeline, TimelinePiece


def add_timeline(tabs: Any, timeline: Timeline, label: str) -> None:
    """Add a step as a variant of the timeline tab; the tab compares its variants."""
    tab = tabs.setdefault("timeline", {"names": [], "kinds": [], "variants": []})
    tab["variants"].append(
        {
            "label": label,
            "seconds": timeline.seconds,
            "devices": [
                {
                    "name": name,
                    "count": device.count,
                    "computing": _track(tab, timeline.computing[name]),
                    "communicating": _track(tab, timeline.communicating[name]),
                }
                for name, device in timeline.played.cluster.devices.items()
            ],
        }
    )
    if len(tab["variants"]) == 1 and "plan" not in tabs:
        _add_summary(tabs, timeline, label)


def _track(tab: Any, pieces: Sequence[TimelinePiece]) -> list[list[Any]]:
    """Return the pieces of a track as rows: name, kind, begin and end in microseconds."""
    rows: list[list[Any]] = []
    for piece in pieces:
        if piece.end <= piece.begin:
            continue
        name, kind = _index(tab["names"], piece.name), _index(tab["kinds"], piece.kind)
        rows.append([name, kind, round(piece.begin * 1e6, 2), round(piece.end * 1e6, 2)])
    return rows


def _index(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _add_summary(tabs: Any, timeline: Timeline, label: str) -> None:
    summary = tabs.summary()
    summary["facts"].append({"label": f"step of {label}", "seconds": timeline.seconds})
    if timeline.throughput is not None:
        text = f"{timeline.throughput:.4g} samples per second"
        summary["facts"].append({"label": "throughput", "text": text})
    cluster = timeline.played.cluster
    if summary["devices"]:
        return
    for name, device in cluster.devices.items():
        summary["devices"].append(
            {
                "name": name,
                "count": device.count,
                "computing": timeline.played.devices[name].computed,
                "waiting": timeline.waiting[name],
                "sending": timeline.sending[name],
                "peak_bytes": timeline.peak_bytes.get(name),
                "memory": cluster.bytes_of(name, device.memory or 0) or None,
            }
        )
    if len(timeline.waiting) == 1:
        summary["sentences"].append(f"A step of {label} takes {duration(timeline.seconds)}.")
        return
    for name, waiting in timeline.waiting.items():
        share = (waiting + timeline.sending[name]) / (timeline.seconds or 1.0)
        summary["sentences"].append(f"{name} computes in {1 - share:.0%} of a step.")
