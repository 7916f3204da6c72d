"""The mean of a bucket over ranks, by reduce and broadcast: every rank sends each other its part, sums its own, and sends that to all.

With two ranks one exchange does: both decode both. So do more of them with a codec that is gathered. Sums are taken in the order of ranks,
and whoever sends bytes decodes its own.

Invariant: all ranks end with the same bits. What is decoded into the gradients of a rank are bytes that every rank has.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qsync_fx.communication import geometry, messages, verdict
from qsync_fx.communication.codecs import PLAIN, Codec
from qsync_fx.communication.exchange import exchange
from qsync_fx.communication.geometry import Piece
from qsync_fx.communication.messages import HEADER, Head
from qsync_fx.communication.state import State
from qsync_fx.communication.tally import Tally


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

    def flats(self) -> list[Tensor]:
        """Returns the values of each parameter in the order they are coded in: views, or copies where they lie otherwise."""
        orders = [geometry.ordered(piece, g) for piece, g in zip(self.pieces, self.gradients, strict=True)]
        return [
            _flat(self.values, g) if order is None else order for g, order in zip(self.gradients, orders, strict=True)
        ]

    def put_back(self, flats: Sequence[Tensor]) -> None:
        """Writes what `flats` returned back to where it is from."""
        for piece, gradient, flat in zip(self.pieces, self.gradients, flats, strict=True):
            geometry.put_back(piece, gradient, flat)

    @property
    def about(self) -> str:
        """What an error says of where it was."""
        return f"bucket {self.index} of step {self.step}"


@dataclass
class Reducer:
    """Reduces buckets one after the other.

    Attributes:
        group: a process group that nobody else uses.
        state: what codecs remember.
        members: the ranks that it averages over, in their order; by default all.
        faults: what was wrong with messages since they were asked for last.
        digest: a hash of what was made of the buckets that were measured.
        finite: whether all that was made in this step is, where that is looked at.
    """

    group: Any
    state: State
    members: tuple[int, ...] = ()
    tally: Tally = field(default_factory=Tally)
    faults: list[str] = field(default_factory=list)
    digest: int = 0
    finite: bool = True
    _memory: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.state.world))
        self._own = self.members.index(self.state.rank)

    def reduce(self, bucket: Bucket) -> None:
        """Puts the mean over ranks in the place of a bucket's values.

        Raises:
            RankError: a rank is gone.
        """
        flats = bucket.flats()
        self.mean(bucket, flats)
        bucket.put_back(flats)
        self.end(bucket, *volumes(bucket.pieces, self._own, len(self.members)))

    def mean(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Puts the mean over its members in the place of these values, one tensor for each piece of a bucket."""
        if len(self.members) == 1:
            return
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            self.state.spend(piece, flat)
        whole = gathered([piece.codec for piece in bucket.pieces], len(self.members))
        for is_whole, exchanged in ((True, self._one_exchange), (False, self._two_exchanges)):
            own = [at for at, found in enumerate(whole) if found == is_whole]
            if own:
                exchanged(replace(bucket, pieces=[bucket.pieces[at] for at in own]), [flats[at] for at in own])

    def end(self, bucket: Bucket, raw: int, theory: float) -> None:
        """Counts a bucket that is reduced."""
        self.tally.buckets += 1
        self.tally.raw += raw
        self.tally.theory += theory
        if bucket.measured:
            # What a NaN carries differs between instruction sets.
            made = torch.where(bucket.values.isnan(), torch.nan, bucket.values)
            self.digest = zlib.crc32(made.numpy().tobytes(), self.digest)

    def fault(self, bucket: Bucket, sender: int, what: str) -> None:
        """Remembers that a message of a member, by its place, could not be read; all ranks are told at the end of the step."""
        self.faults.append(messages.unread(self.state.rank, self.members[sender], bucket.about, what))

    def settle(self, step: int, compared: bool = False) -> None:
        """Ends a step, whose buckets are all reduced; `compared` says whether what was made of them is counted as compared.

        Raises:
            RankError: on all ranks, if one could not read a message, or has made something else.
        """
        self.tally.steps += 1
        if self.state.world == 1:
            return
        faults, digest, finite = self.faults, self.digest, self.finite
        self.faults, self.digest, self.finite = [], 0, True
        used = verdict.settle(self.group, self.state.rank, self.state.world, step, faults, digest, finite)
        self.state.settle(used)
        self.tally.checks += compared

    def _one_exchange(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        parts = [slice(0, piece.size) for piece in bucket.pieces]
        mine = self._encoded(bucket, flats, parts, "mine", summed=False)
        rank, ranks = self._own, range(len(self.members))
        others = [peer for peer in ranks if peer != rank]
        theirs = {peer: self._memory_for(bucket, f"all of {peer}", mine.numel()) for peer in others}
        self._exchange(bucket, dict.fromkeys(others, mine), theirs)
        theirs[rank] = mine
        self._decode(bucket, flats, parts, [theirs[sender] for sender in ranks], first=0)
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            piece.codec.settle(flat.div_(len(ranks)))

    def _two_exchanges(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        rank, ranks = self._own, range(len(self.members))
        others = [peer for peer in ranks if peer != rank]
        parts = {owner: [piece.part(owner) for piece in bucket.pieces] for owner in ranks}
        mine = {owner: self._encoded(bucket, flats, parts[owner], f"to {owner}", summed=False) for owner in ranks}
        theirs = {peer: self._memory_for(bucket, f"from {peer}", mine[rank].numel()) for peer in others}
        self._exchange(bucket, {peer: mine[peer] for peer in others}, theirs)
        theirs[rank] = mine[rank]
        self._decode(bucket, flats, parts[rank], [theirs[sender] for sender in ranks], first=0)
        for flat, part in zip(flats, parts[rank], strict=True):
            flat[part].div_(len(ranks))

        mean = self._encoded(bucket, flats, parts[rank], "mean", summed=True)
        means = {
            owner: self._memory_for(bucket, f"mean of {owner}", self._length(bucket, parts[owner])) for owner in others
        }
        self._exchange(bucket, dict.fromkeys(others, mean), means)
        means[rank] = mean
        for owner in ranks:
            self._decode(bucket, flats, parts[owner], [means[owner]], first=owner, summed=True)

    def _encoded(
        self, bucket: Bucket, flats: Sequence[Tensor], parts: Sequence[slice], name: str, summed: bool
    ) -> Tensor:
        """Returns a message with these parts of a bucket."""
        begin = time.perf_counter()
        message = self._memory_for(bucket, name, self._length(bucket, parts))
        self._head(bucket, self._own, message, summed).write(message)
        at = HEADER
        for piece, flat, part in zip(bucket.pieces, flats, parts, strict=True):
            to = message[at : at + piece.nbytes(part)]
            at += to.numel()
            if part.start == part.stop:
                continue
            residual = self.state.residual(piece, part, summed)
            given = flat[part] if residual is None or not bucket.measured else flat[part] + residual
            draw = self.state.draw(piece, bucket.step, part.start, summed)
            piece.codec.encode(flat[part], to, draw, residual)
            if bucket.measured and not summed:
                self.tally.measure(given, piece.codec, to)
        self.tally.encode += time.perf_counter() - begin
        return message

    def _exchange(self, bucket: Bucket, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        begin = time.perf_counter()
        ranks = self.members
        given, taken = ({ranks[at]: found for at, found in one.items()} for one in (outgoing, incoming))
        exchange(self.group, given, taken, bucket.about)
        self.tally.transfer += time.perf_counter() - begin
        sent = sum(message.numel() for message in outgoing.values())
        self.tally.wire += sent

    def _decode(
        self,
        bucket: Bucket,
        flats: Sequence[Tensor],
        parts: Sequence[slice],
        received: Sequence[Tensor],
        first: int,
        summed: bool = False,
    ) -> None:
        """Sums messages of the ranks from `first` on, in their order, into these parts of a bucket."""
        begin = time.perf_counter()
        good = []
        for sender, message in enumerate(received, first):
            fault = self._head(bucket, sender, message, summed).fault(message)
            if fault is None:
                good.append((sender, message))
            else:
                self.fault(bucket, sender, fault)
        for number, (sender, message) in enumerate(good):
            at = HEADER
            for piece, flat, part in zip(bucket.pieces, flats, parts, strict=True):
                nbytes = piece.nbytes(part)
                if part.start != part.stop:
                    try:
                        piece.codec.decode(message[at : at + nbytes], flat[part], add=number > 0)
                    except ValueError as error:
                        self.fault(bucket, sender, str(error))
                at += nbytes
        self.tally.decode += time.perf_counter() - begin

    def _head(self, bucket: Bucket, sender: int, message: Tensor, summed: bool) -> Head:
        what = messages.hash_of(self.state.codec)
        return Head(what, self.members[sender], 2 * bucket.index + summed, bucket.step, message.numel() - HEADER)

    def _length(self, bucket: Bucket, parts: Sequence[slice]) -> int:
        return HEADER + sum(piece.nbytes(part) for piece, part in zip(bucket.pieces, parts, strict=True))

    def _memory_for(self, bucket: Bucket, name: str, nbytes: int) -> Tensor:
        """Returns bytes that stay from step to step: new memory costs more than it takes to fill it."""
        key = (bucket.index, name)
        found = self._memory.get(key)
        if found is None or found.numel() != nbytes:
            found = self._memory[key] = torch.zeros(nbytes, dtype=torch.uint8)
        return found


def _flat(values: Tensor, gradient: Tensor) -> Tensor:
    """Returns the values of a gradient as they lie in memory."""
    at = gradient.storage_offset() - values.storage_offset()
    return values[at : at + gradient.numel()]


def gathered(codecs: Sequence[Codec], ranks: int) -> list[bool]:
    """Returns which parameters of a bucket, by their codecs, are sent whole to all ranks. What is FP32 goes along with those that have to
    be: it comes to the same bits either way."""
    some = any(codec.gathered for codec in codecs)
    return [ranks == 2 or codec.gathered or (some and codec == PLAIN) for codec in codecs]


def volumes(pieces: Sequence[Piece], rank: int, ranks: int) -> tuple[int, float]:
    """Returns the bytes that a rank sends of a bucket in FP32, without headers, and what the papers give for its codecs."""
    raw, theory = 0, 0.0
    for piece, whole in zip(pieces, gathered([piece.codec for piece in pieces], ranks), strict=True):
        if whole:
            raw += (ranks - 1) * PLAIN.nbytes(piece.size)
            theory += (ranks - 1) * piece.codec.theory(piece.size)
            continue
        own = piece.part(rank)
        others = piece.size - (own.stop - own.start)
        raw += 4 * (others + (ranks - 1) * (own.stop - own.start))
        theory += piece.codec.theory(others) + (ranks - 1) * piece.codec.theory(own.stop - own.start)
    return raw, theory
