"""Gradient buckets, and the shard of each parameter that each rank reduces.

Invariant: the result for a parameter follows from its index and shape and the number of ranks, not
from its bucket, as DistributedDataParallel rebuilds its buckets after the first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx import _C
from qsync_fx.communication.codecs import PLAIN, buffers
from qsync_fx.communication.codecs.codec import Codec


@dataclass(frozen=True)
class ParameterSlice:
    """One parameter, cut into one shard for each rank."""

    name: str
    index: int  # among the model's parameters
    size: int
    codec: Codec
    cuts: tuple[int, ...]  # ranks + 1 ascending offsets; shards may be empty
    inside: Codec = PLAIN  # inside nodes, unless the codec between them is FP32

    def part(self, owner: int) -> slice:
        """Return the shard that rank `owner` reduces; small parameters are spread over ranks."""
        index = (owner - self.index) % (len(self.cuts) - 1)
        return slice(self.cuts[index], self.cuts[index + 1])

    def shard_size(self, rank: int) -> int:
        """Return the number of values in the shard of a rank."""
        part = self.part(rank)
        return int(part.stop - part.start)

    def __str__(self) -> str:
        text = f"{self.name}: {self.size} values by {self.codec!r}"
        return text if self.inside == PLAIN else f"{text}, {self.inside!r} inside nodes"


def piece(
    name: str, index: int, shape: Sequence[int], codec: Codec, ranks: int, unit: int = 1
) -> ParameterSlice:
    """Return the slice of a parameter of this shape; see `cut`."""
    return cut(name, index, math.prod(shape), codec.fitted(shape), ranks, unit)


def cut(
    name: str, index: int, size: int, codec: Codec, ranks: int, unit: int = 1
) -> ParameterSlice:
    """Return the slice of `size` values, cut at multiples of the codec's unit and of `unit`."""
    unit = math.lcm(codec.unit, unit)
    units = -(-size // unit)
    cuts = tuple(min(units * rank // ranks * unit, size) for rank in range(ranks + 1))
    return ParameterSlice(name, index, size, codec, cuts)


def threshold(sizes: Sequence[int], share: float = 0.99) -> int:
    """Return the largest size threshold with which more than `share` of all values are coded."""
    total, coded = sum(sizes), 0
    for size in sorted(sizes, reverse=True):
        coded += size
        if coded > share * total:
            return size
    return 0


def views(values: Tensor, buffer: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `values` with the layout that `gradients` have in `buffer` (equal length)."""
    shift = values.storage_offset() - buffer.storage_offset()
    return [values.as_strided(g.size(), g.stride(), g.storage_offset() + shift) for g in gradients]


def ordered(piece: ParameterSlice, gradient: Tensor, room: Tensor | None = None) -> Tensor | None:
    """Return a copy of a gradient in coding order, in `room` if given; None if it is in order."""
    columns = piece.codec.columns(gradient)
    if columns is None:
        return None
    if room is None:
        room = columns.new_empty(piece.size)
    _copy(columns, room.view(columns.shape))
    return room


def flat(piece: ParameterSlice, gradient: Tensor) -> Tensor:
    """Return a gradient as a 1-D tensor in coding order: a view if possible. It must be dense."""
    if (result := ordered(piece, gradient)) is not None:
        return result
    return gradient.as_strided((gradient.numel(),), (1,))


def put_back(piece: ParameterSlice, gradient: Tensor, values: Tensor) -> None:
    """Write the values that `ordered` returned back to `gradient`."""
    columns = piece.codec.columns(gradient)
    if columns is not None:
        _copy(values.view(columns.shape), columns)


def recoded(old: ParameterSlice, new: ParameterSlice, like: Tensor, values: Tensor) -> Tensor:
    """Return values in the coding order of an old slice in the order of a new one, 1-D.

    `like` has the layout of the gradients.
    """
    gradient = torch.zeros_like(like)
    result = flat(old, gradient)
    result.copy_(values)
    put_back(old, gradient, result)
    return flat(new, gradient)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy values; transpose FP32 matrices on the CPU natively, which is faster than `copy_`."""
    both = (source, target)
    if source.dim() == 2 and all(buffers.native(t) and t.dtype == torch.float32 for t in both):
        for rows, columns in (both, (source.t(), target.t())):
            if rows.is_contiguous() and columns.t().is_contiguous():
                height, width = rows.shape
                threads = torch.get_num_threads()
                _C.turn(source.data_ptr(), target.data_ptr(), 1, height, width, 4, threads)
                return
    target.copy_(source)


@dataclass
class Bucket:
    """Bucket of gradients, reduced in place."""

    index: int  # position in the step
    step: int
    values: Tensor  # 1-D, FP32
    pieces: Sequence[ParameterSlice]
    gradients: Sequence[Tensor]  # views of `values` with the shapes and strides of the parameters
    measured: bool = False  # whether to measure the coding error and compare results

    def parts(self, owner: int) -> list[slice]:
        """Return the shards that rank `owner` reduces."""
        return [piece.part(owner) for piece in self.pieces]

    @property
    def reordered(self) -> int:
        """Number of values whose memory order differs from coding order."""
        both = zip(self.pieces, self.gradients, strict=True)
        return sum(piece.size for piece, g in both if piece.codec.columns(g) is not None)

    def flats(self, room: Tensor | None = None) -> list[Tensor]:
        """Return the values of each piece in coding order: views, or copies in `room`, FP32."""
        result, used = list[Tensor](), 0
        for piece, gradient in zip(self.pieces, self.gradients, strict=True):
            target = None if room is None else room[used : used + piece.size]
            values = ordered(piece, gradient, target)
            if values is None:
                index = gradient.storage_offset() - self.values.storage_offset()
                values = self.values[index : index + gradient.numel()]
            else:
                used += piece.size
            result.append(values)
        return result

    def put_back(self, flats: Sequence[Tensor]) -> None:
        """Write the tensors of `flats` back to the gradients."""
        for piece, gradient, flat in zip(self.pieces, self.gradients, flats, strict=True):
            put_back(piece, gradient, flat)

    @property
    def about(self) -> str:
        return f"bucket {self.index} of step {self.step}"


def gathered(codecs: Sequence[Codec], ranks: int) -> list[bool]:
    """Return for each codec of a bucket whether one all-gather replaces both exchanges.

    FP32 parameters join an all-gather that other parameters need; both methods give the same bits.
    """
    some = any(codec.gathered for codec in codecs)
    return [ranks == 2 or codec.gathered or (some and codec == PLAIN) for codec in codecs]


def volumes(pieces: Sequence[ParameterSlice], rank: int, ranks: int) -> tuple[int, float]:
    """Return a rank's bytes for a bucket, without headers: in FP32, and by the codecs' papers."""
    full = gathered([piece.codec for piece in pieces], ranks)
    full_pieces = [piece for piece, item in zip(pieces, full, strict=True) if item]
    cut_pieces = [piece for piece, item in zip(pieces, full, strict=True) if not item]
    raw = (ranks - 1) * sum(PLAIN.nbytes(piece.size) for piece in full_pieces)
    theory = (ranks - 1) * sum(piece.codec.theory(piece.size) for piece in full_pieces)
    for phase in (scattering(cut_pieces, rank), giving(cut_pieces, rank, ranks)):
        raw, theory = raw + phase[0], theory + phase[1]
    return raw, theory


def scattering(pieces: Sequence[ParameterSlice], rank: int) -> tuple[int, float]:
    """Return the same as `volumes` for the reduce-scatter alone."""
    raw = 4 * sum(piece.size - piece.shard_size(rank) for piece in pieces)
    return raw, sum(piece.codec.theory(piece.size - piece.shard_size(rank)) for piece in pieces)


def giving(pieces: Sequence[ParameterSlice], rank: int, ranks: int) -> tuple[int, float]:
    """Return the same as `volumes` for the all-gather alone."""
    theory = sum(piece.codec.theory(piece.shard_size(rank)) for piece in pieces)
    return 4 * (ranks - 1) * sum(piece.shard_size(rank) for piece in pieces), (ranks - 1) * theory
