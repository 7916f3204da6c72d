"""A bucket of gradients that is to be averaged, and what of it travels.

Invariant: the order in which a parameter's values are coded is that of its piece, whatever buckets DistributedDataParallel makes.

Where the values of a gradient bucket go: which codec each parameter has, and which rank sums which part of it.

Invariant: all of it follows from the parameter's index and shape and the number of ranks, and nothing from the buckets that
DistributedDataParallel makes, which it makes anew after the first step. So what a parameter's gradient becomes does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.communication.codecs import PLAIN, buffers
from qsync_fx.communication.codecs.codec import Codec


@dataclass(frozen=True)
class ParameterSlice:
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
        index = self._at(owner)
        return slice(self.cuts[index], self.cuts[index + 1])

    def own(self, rank: int) -> int:
        """Returns how many values a rank sums."""
        index = self._at(rank)
        return self.cuts[index + 1] - self.cuts[index]

    def _at(self, owner: int) -> int:
        return (owner - self.index) % (len(self.cuts) - 1)

    def nbytes(self, part: slice) -> int:
        return self.codec.nbytes(part.stop - part.start)


def piece(
    name: str, index: int, shape: Sequence[int], codec: Codec, ranks: int, unit: int = 1
) -> ParameterSlice:
    """Returns the piece of a parameter of this shape, cut where such a `unit` ends, too."""
    size = 1
    for extent in shape:
        size *= extent
    return cut(name, index, size, codec.fitted(shape), ranks, unit)


def cut(
    name: str, index: int, size: int, codec: Codec, ranks: int, unit: int = 1
) -> ParameterSlice:
    """Returns the piece of so many values, cut where units of the codec end, and such a `unit`."""
    unit = math.lcm(codec.unit, unit)
    units = -(-size // unit)
    return ParameterSlice(
        name,
        index,
        size,
        codec,
        tuple(min(units * rank // ranks * unit, size) for rank in range(ranks + 1)),
    )


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


def ordered(piece: ParameterSlice, gradient: Tensor, room: Tensor | None = None) -> Tensor | None:
    """Returns the values of a gradient in the order they are coded in, as a copy, in `room` where it is given; None where they lie so
    already."""
    columns = piece.codec.columns(gradient)
    if columns is None:
        return None
    result = columns.new_empty(piece.size) if room is None else room
    _copied(columns, result.view(columns.shape))
    return result


def flat(piece: ParameterSlice, gradient: Tensor) -> Tensor:
    """Returns the values of a gradient that is dense in memory, in the order they are coded in: a view where they lie so."""
    order = ordered(piece, gradient)
    return gradient.as_strided((gradient.numel(),), (1,)) if order is None else order


def put_back(piece: ParameterSlice, gradient: Tensor, values: Tensor) -> None:
    """Writes what `ordered` returned back to where it is from."""
    columns = piece.codec.columns(gradient)
    if columns is not None:
        _copied(values.view(columns.shape), columns)


def _copied(source: Tensor, target: Tensor) -> None:
    """Copies values. Of FP32 matrices on the CPU of which one lies by rows and the other by columns a kernel of ours does, which takes a
    seventh to a half of the time of torch's copy."""
    both = (source, target)
    if source.dim() == 2 and all(buffers.native(t) and t.dtype == torch.float32 for t in both):
        for inputs, made in (both, (source.t(), target.t())):
            if inputs.is_contiguous() and made.t().is_contiguous():
                buffers.kernels().turn(
                    source.data_ptr(), target.data_ptr(), 1, *inputs.shape, 4, buffers.threads()
                )
                return
    target.copy_(source)


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
    pieces: Sequence[ParameterSlice]
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
        result, used = list[Tensor](), 0
        for piece, gradient in zip(self.pieces, self.gradients, strict=True):
            owned = None if room is None else room[used : used + piece.size]
            order = ordered(piece, gradient, owned)
            used += 0 if order is None else piece.size
            result.append(_flat(self.values, gradient) if order is None else order)
        return result

    def put_back(self, flats: Sequence[Tensor]) -> None:
        """Writes what `flats` returned back to where it is from."""
        for piece, gradient, flat in zip(self.pieces, self.gradients, flats, strict=True):
            put_back(piece, gradient, flat)

    @property
    def about(self) -> str:
        """What an error says of where it was."""
        return f"bucket {self.index} of step {self.step}"


def gathered(codecs: Sequence[Codec], ranks: int) -> list[bool]:
    """Returns which parameters of a bucket, by their codecs, are sent whole to all ranks. What is FP32 goes along with those that have to
    be: it comes to the same bits either way."""
    some = any(codec.gathered for codec in codecs)
    return [ranks == 2 or codec.gathered or (some and codec == PLAIN) for codec in codecs]


def volumes(pieces: Sequence[ParameterSlice], rank: int, ranks: int) -> tuple[int, float]:
    """Returns the bytes that a rank sends of a bucket in FP32, without headers, and what the papers give for its codecs."""
    sent = gathered([piece.codec for piece in pieces], ranks)
    full = [piece for piece, item in zip(pieces, sent, strict=True) if item]
    parts = [piece for piece, item in zip(pieces, sent, strict=True) if not item]
    (scattered, less), (inputs, fewer) = scattering(parts, rank), giving(parts, rank, ranks)
    raw = (ranks - 1) * sum(PLAIN.nbytes(piece.size) for piece in full)
    return raw + scattered + inputs, (ranks - 1) * sum(
        p.codec.theory(p.size) for p in full
    ) + less + fewer


def scattering(pieces: Sequence[ParameterSlice], rank: int) -> tuple[int, float]:
    """Returns the same where each rank is sent its own part alone."""
    others = [piece.size - piece.own(rank) for piece in pieces]
    return 4 * sum(others), sum(
        piece.codec.theory(size) for piece, size in zip(pieces, others, strict=True)
    )


def giving(pieces: Sequence[ParameterSlice], rank: int, ranks: int) -> tuple[int, float]:
    """Returns the same where each rank gives its own part to all others."""
    theory = sum(piece.codec.theory(piece.own(rank)) for piece in pieces)
    return 4 * (ranks - 1) * sum(piece.own(rank) for piece in pieces), (ranks - 1) * theory


def _flat(values: Tensor, gradient: Tensor) -> Tensor:
    """Returns the values of a gradient as they lie in memory."""
    index = gradient.storage_offset() - values.storage_offset()
    return values[index : index + gradient.numel()]
