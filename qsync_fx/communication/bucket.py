"""A bucket of gradients that is to be averaged, and what of it travels.

Invariant: the order in which a parameter's values are coded is that of its piece, whatever buckets DistributedDataParallel makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qsync_fx.communication import geometry
from qsync_fx.communication.codecs import PLAIN, Codec
from qsync_fx.communication.geometry import Piece


@dataclass
class Bucket:
    """One bucket to be reduced, in place.

    Attributes:
        index, step: which, and when.
        values: FP32.
        pieces: its parameters, in its order.
        gradients: views of `values`, as the parameters are shaped.
        measured: whether what the codec changes is measured, and what it makes is compared.
    """

    index: int
    step: int
    values: Tensor
    pieces: Sequence[Piece]
    gradients: Sequence[Tensor]
    measured: bool = False

    @property
    def reordered(self) -> int:
        """How many values lie in another order than they are coded in."""
        both = zip(self.pieces, self.gradients, strict=True)
        return sum(piece.size for piece, g in both if piece.codec.columns(g) is not None)

    def flats(self, room: Tensor | None = None) -> list[Tensor]:
        """Returns the values of each parameter in the order they are coded in: views, or copies where they lie otherwise, in `room`, which
        has as many values as `reordered` says."""
        found, used = list[Tensor](), 0
        for piece, gradient in zip(self.pieces, self.gradients, strict=True):
            own = None if room is None else room[used : used + piece.size]
            order = geometry.ordered(piece, gradient, own)
            used += 0 if order is None else piece.size
            found.append(_flat(self.values, gradient) if order is None else order)
        return found

    def put_back(self, flats: Sequence[Tensor]) -> None:
        """Writes what `flats` returned back to where it is from."""
        for piece, gradient, flat in zip(self.pieces, self.gradients, flats, strict=True):
            geometry.put_back(piece, gradient, flat)

    @property
    def about(self) -> str:
        """What an error says of where it was."""
        return f"bucket {self.index} of step {self.step}"


def gathered(codecs: Sequence[Codec], ranks: int) -> list[bool]:
    """Returns which parameters of a bucket, by their codecs, are sent whole to all ranks. What is FP32 goes along with those that have to
    be: it comes to the same bits either way."""
    some = any(codec.gathered for codec in codecs)
    return [ranks == 2 or codec.gathered or (some and codec == PLAIN) for codec in codecs]


def volumes(pieces: Sequence[Piece], rank: int, ranks: int) -> tuple[int, float]:
    """Returns the bytes that a rank sends of a bucket in FP32, without headers, and what the papers give for its codecs."""
    sent = gathered([piece.codec for piece in pieces], ranks)
    whole = [piece for piece, found in zip(pieces, sent, strict=True) if found]
    parts = [piece for piece, found in zip(pieces, sent, strict=True) if not found]
    (scattered, less), (given, fewer) = scattering(parts, rank), giving(parts, rank, ranks)
    raw = (ranks - 1) * sum(PLAIN.nbytes(piece.size) for piece in whole)
    return raw + scattered + given, (ranks - 1) * sum(p.codec.theory(p.size) for p in whole) + less + fewer


def scattering(pieces: Sequence[Piece], rank: int) -> tuple[int, float]:
    """Returns the same where each rank is sent its own part alone."""
    others = [piece.size - piece.own(rank) for piece in pieces]
    return 4 * sum(others), sum(piece.codec.theory(size) for piece, size in zip(pieces, others, strict=True))


def giving(pieces: Sequence[Piece], rank: int, ranks: int) -> tuple[int, float]:
    """Returns the same where each rank gives its own part to all others."""
    theory = sum(piece.codec.theory(piece.own(rank)) for piece in pieces)
    return 4 * (ranks - 1) * sum(piece.own(rank) for piece in pieces), (ranks - 1) * theory


def _flat(values: Tensor, gradient: Tensor) -> Tensor:
    """Returns the values of a gradient as they lie in memory."""
    at = gradient.storage_offset() - values.storage_offset()
    return values[at : at + gradient.numel()]
