"""Timelines as JSON of the Trace Event Format, which Perfetto and Chrome show: a process a class of devices, with a track for what it
computes and one for what it sends.

Waiting is shown on both tracks. An arrow leads from the entry after which a bucket is ready to where it travels.

Invariant: times are microseconds from the begin of the step, and pieces of one track do not overlap.
"""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Any

from qsync_fx.codec import Path
from qsync_fx.errors import ProfileError, QSyncError
from qsync_fx.files import write_text

if TYPE_CHECKING:
    from qsync_fx.timeline.timeline import Piece, Timeline

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
        raise ProfileError(f"the timeline is not saved: {error.what}", where=error.where, do=error.do) from error


def trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the object of the format."""
    events: list[dict[str, Any]] = []
    # Process 0 is the idle one to tools that know Linux.
    for at, (name, device) in enumerate(timeline.played.cluster.devices.items(), start=1):
        title = f"{name} ({device.count} devices)" if device.count > 1 else name
        events.append({"ph": "M", "name": "process_name", "pid": at, "tid": 0, "args": {"name": title}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": at, "tid": 0, "args": {"sort_index": at}})
        tracks = {"computation": timeline.computing[name], "communication": timeline.communicating[name]}
        for tid, (track, pieces) in enumerate(tracks.items(), start=1):
            events.append({"ph": "M", "name": "thread_name", "pid": at, "tid": tid, "args": {"name": track}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": at, "tid": tid, "args": {"sort_index": tid}})
            events += [_slice(piece, at, tid) for piece in pieces]
        events += _arrows(timeline, name, at)
    return {"displayTimeUnit": "ms", "otherData": {"seconds": timeline.seconds}, "traceEvents": events}


def _slice(piece: Piece, pid: int, tid: int) -> dict[str, Any]:
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
    for number, (ready, sent) in enumerate(zip(step.ready[pid - 1].tolist(), step.sent.tolist(), strict=True)):
        # An arrow belongs to the slice that its time lies within, and a bucket is ready when one ends.
        made_by = max((piece for piece in pieces if piece.begin < ready), key=lambda piece: piece.begin, default=None)
        if made_by is None:
            continue
        same = {"cat": "ready", "name": "ready", "id": f"{name} {number}", "pid": pid}
        events.append({"ph": "s", **same, "tid": 1, "ts": (made_by.begin + made_by.end) / 2 * 1e6})
        events.append({"ph": "f", "bp": "e", **same, "tid": 2, "ts": sent * 1e6})
    return events
