"""Where the values of a gradient bucket go: which codec each parameter has, and which rank sums which part of it.

Invariant: all of it follows from the parameter's index and shape and the number of ranks, and nothing from the buckets that
DistributedDataParallel makes, which it makes anew after the first step. So what a parameter's gradient becomes does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.communication.codecs import Codec, memory


@dataclass(frozen=True)
class Piece:
    """One parameter.

    Attributes:
        name: as the model calls it.
        index: its place among the model's parameters.
        size: how many values it has.
        codec: what writes its gradient.
        cuts: where it is cut, one part a rank, some of them empty perhaps.
    """

    name: str
    index: int
    size: int
    codec: Codec
    cuts: tuple[int, ...]

    def part(self, owner: int) -> slice:
        """Returns the values that a rank sums. Ranks begin with another part of each parameter, so that small ones are shared out, too."""
        at = self._at(owner)
        return slice(self.cuts[at], self.cuts[at + 1])

    def own(self, rank: int) -> int:
        """Returns how many values a rank sums."""
        at = self._at(rank)
        return self.cuts[at + 1] - self.cuts[at]

    def _at(self, owner: int) -> int:
        return (owner - self.index) % (len(self.cuts) - 1)

    def nbytes(self, part: slice) -> int:
        return self.codec.nbytes(part.stop - part.start)


def piece(name: str, index: int, shape: Sequence[int], codec: Codec, ranks: int, unit: int = 1) -> Piece:
    """Returns the piece of a parameter of this shape, cut where such a `unit` ends, too."""
    size = 1
    for extent in shape:
        size *= extent
    return cut(name, index, size, codec.fitted(shape), ranks, unit)


def cut(name: str, index: int, size: int, codec: Codec, ranks: int, unit: int = 1) -> Piece:
    """Returns the piece of so many values, cut where units of the codec end, and such a `unit`."""
    unit = math.lcm(codec.unit, unit)
    units = -(-size // unit)
    return Piece(name, index, size, codec, tuple(min(units * rank // ranks * unit, size) for rank in range(ranks + 1)))


def threshold(sizes: Sequence[int], share: float = 0.99) -> int:
    """Returns the size from which tensors are coded: the largest with which more than this share of all values still is."""
    total, coded = sum(sizes), 0
    for size in sorted(sizes, reverse=True):
        coded += size
        if coded > share * total:
            return size
    return 0


def views(values: Tensor, buffer: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the views of `values` that `gradients` are of `buffer`, which is as long."""
    shift = values.storage_offset() - buffer.storage_offset()
    return [values.as_strided(g.size(), g.stride(), g.storage_offset() + shift) for g in gradients]


def ordered(piece: Piece, gradient: Tensor, room: Tensor | None = None) -> Tensor | None:
    """Returns the values of a gradient in the order they are coded in, as a copy, in `room` where it is given; None where they lie so
    already."""
    columns = piece.codec.columns(gradient)
    if columns is None:
        return None
    found = columns.new_empty(piece.size) if room is None else room
    _copied(columns, found.view(columns.shape))
    return found


def flat(piece: Piece, gradient: Tensor) -> Tensor:
    """Returns the values of a gradient that is dense in memory, in the order they are coded in: a view where they lie so."""
    order = ordered(piece, gradient)
    return gradient.as_strided((gradient.numel(),), (1,)) if order is None else order


def put_back(piece: Piece, gradient: Tensor, values: Tensor) -> None:
    """Writes what `ordered` returned back to where it is from."""
    columns = piece.codec.columns(gradient)
    if columns is not None:
        _copied(values.view(columns.shape), columns)


def _copied(source: Tensor, target: Tensor) -> None:
    """Copies values. Of FP32 matrices on the CPU of which one lies by rows and the other by columns a kernel of ours does, which takes a
    seventh to a half of the time of torch's copy."""
    both = (source, target)
    if source.dim() == 2 and all(memory.native(t) and t.dtype == torch.float32 for t in both):
        for given, made in (both, (source.t(), target.t())):
            if given.is_contiguous() and made.t().is_contiguous():
                memory.kernels().turn(source.data_ptr(), target.data_ptr(), 1, *given.shape, 4, memory.threads())
                return
    target.copy_(source)
