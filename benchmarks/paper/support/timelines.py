"""Timelines as SVG, below each other on one time scale.

Each device class has a track for computation and a track for communication. Invariant: the width of
a rectangle is proportional to its duration; adjacent pieces of one kind merge if the gap between
them is invisible.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from qsync_fx.timeline.timeline import Timeline, TimelinePiece

COLORS = {
    "forward": "#4c78a8",
    "backward": "#1b4f8a",
    "cast": "#b07aa1",
    "outside": "#9d9d9d",
    "optimizer": "#59a14f",
    "waiting": "#f1c5c0",
    "sending": "#f2a541",
}
WIDE, LEFT, RIGHT, TRACK, BAR, HEAD = 960, 190, 20, 26, 20, 24
SEEN = 0.3
"""Smallest visible gap, in pixels."""


def picture(timelines: Mapping[str, Timeline]) -> str:
    """Return the timelines as an SVG document."""
    scale = (WIDE - LEFT - RIGHT) / max(timeline.seconds for timeline in timelines.values())
    parts, high = list(_legend()), 56
    for name, timeline in timelines.items():
        title = f"{name}: {1e3 * timeline.seconds:.4g} ms a step"
        parts.append(f'<text x="10" y="{high + 14}" font-weight="bold">{html.escape(title)}</text>')
        high += HEAD
        for track, pieces in _tracks(timeline):
            parts.append(f'<text x="10" y="{high + 15}">{html.escape(track)}</text>')
            parts += [
                f'<rect class="{kind}" x="{LEFT + begin * scale:.2f}" y="{high}" '
                f'width="{(end - begin) * scale:.2f}" '
                f'height="{BAR}" fill="{COLORS[kind]}"><title>{kind}, {1e3 * (end - begin):.4g} '
                "ms</title></rect>"
                for kind, begin, end in _joined(pieces, SEEN / scale)
            ]
            high += TRACK
        high += TRACK - BAR
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" width="{WIDE}" '
        f'height="{high}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    )
    ground = f'<rect width="{WIDE}" height="{high}" fill="white"/>'
    return (
        "\n".join([head, "<title>A step before and after</title>", ground, *parts, "</svg>"]) + "\n"
    )


def _tracks(timeline: Timeline) -> Iterator[tuple[str, Sequence[TimelinePiece]]]:
    for name, device in timeline.played.cluster.devices.items():
        title = f"{device.count} {name}" if device.count > 1 else name
        yield f"{title}, computation", timeline.computing[name]
        yield f"{title}, communication", timeline.communicating[name]


def _joined(pieces: Sequence[TimelinePiece], nearest: float) -> Iterator[tuple[str, float, float]]:
    """Yield (kind, begin, end); pieces of one kind merge if their gap is below `nearest` s."""
    current: tuple[str, float, float] | None = None
    for piece in pieces:
        if current is not None and current[0] == piece.kind and piece.begin - current[2] < nearest:
            current = (piece.kind, current[1], piece.end)
            continue
        if current is not None:
            yield current
        current = (piece.kind, piece.begin, piece.end)
    if current is not None:
        yield current


def _legend() -> Iterator[str]:
    for index, (kind, color) in enumerate(COLORS.items()):
        x = 10 + index * 118
        yield f'<rect x="{x}" y="14" width="14" height="14" fill="{color}"/>'
        yield f'<text x="{x + 20}" y="26">{kind}</text>'
