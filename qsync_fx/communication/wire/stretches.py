"""Messages in stretches, so that a link works while values are coded: one is sent while the next is encoded, and read while others come.

Invariant: where a message is cut follows from its parameters and the parts of them that it holds, so that all ranks cut it alike; values
are cut where units of their codec end, so that what becomes of them does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.communication.geometry import Piece
from qsync_fx.communication.wire.messages import HEADER

VALUES: Final = 2**20
"""The most that a stretch holds, unless one unit of a codec has more. Of 4 MB in FP32, 8 bits are under way for 9 ms at 1 Gbps, and coded
in one or two; what a stretch costs besides is a tenth of a millisecond."""


@dataclass(frozen=True)
class Run:
    """Values of one parameter.

    Attributes:
        place: of the parameter in its bucket.
        values: which, of those of its part that the message holds.
        wire: their bytes in the message.
    """

    place: int
    values: slice
    wire: slice


@dataclass(frozen=True)
class Stretch:
    """Bytes of a message that are sent at once, and what is in them; those of the first begin with the head."""

    wire: slice
    runs: tuple[Run, ...]

    @property
    def coded(self) -> slice:
        """The bytes of what is in it, without the head."""
        return slice(self.runs[0].wire.start, self.wire.stop) if self.runs else slice(self.wire.stop, self.wire.stop)

    def within(self, run: Run) -> slice:
        """Returns where the bytes of a run lie among those."""
        begin = self.coded.start
        return slice(run.wire.start - begin, run.wire.stop - begin)


def stretches(pieces: Sequence[Piece], parts: Sequence[slice], most: int | None = None) -> list[Stretch]:
    """Returns a message that holds these parts of parameters, after its head, in stretches of at most `most` values."""
    most = VALUES if most is None else most
    found: list[Stretch] = []
    runs: list[Run] = []
    begin, end, room = 0, HEADER, most

    def close() -> None:
        nonlocal begin, room
        found.append(Stretch(slice(begin, end), tuple(runs)))
        runs.clear()
        begin, room = end, most

    for place, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        at, size, unit = 0, part.stop - part.start, piece.codec.unit
        while at < size:
            if room < min(unit, size - at) and runs:
                close()
            taken = min(size - at, max(room // unit, 1) * unit)
            nbytes = piece.codec.nbytes(taken)
            runs.append(Run(place, slice(at, at + taken), slice(end, end + nbytes)))
            at, end, room = at + taken, end + nbytes, room - taken
    if runs or not found:
        close()
    return found
