"""The mean of a bucket over ranks, by reduce and broadcast: every rank sends each other its part, sums its own, and sends that to all.

With two ranks one exchange does: both decode both. So do more of them with a codec that is gathered. Sums are taken in the order of ranks,
and whoever sends bytes decodes its own. Either half is had alone, too, where each rank keeps its own part.

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

from qsync_fx.communication.bucket import Bucket, gathered, giving, scattering, volumes
from qsync_fx.communication.state import State
from qsync_fx.communication.tally import Tally
from qsync_fx.communication.wire import messages, verdict
from qsync_fx.communication.wire.exchange import exchange
from qsync_fx.communication.wire.messages import HEADER, Head


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
        used: whether that of the last step was on all ranks.
    """

    group: Any
    state: State
    members: tuple[int, ...] = ()
    tally: Tally = field(default_factory=Tally)
    faults: list[str] = field(default_factory=list)
    digest: int = 0
    finite: bool = True
    used: bool = True
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

    def scatter(self, bucket: Bucket) -> None:
        """Puts the mean over ranks in the place of this rank's part of each parameter, and zeros in that of the others'.

        Raises:
            RankError: a rank is gone.
        """
        flats = bucket.flats()
        self._sum(bucket, flats)
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            own = piece.part(self._own)
            flat[: own.start].zero_()
            flat[own.stop :].zero_()
        bucket.put_back(flats)
        self._count(*scattering(bucket.pieces, self._own))

    def give(self, bucket: Bucket, own: Sequence[Tensor], flats: Sequence[Tensor], onto: Sequence[bool]) -> None:
        """Writes what each rank has of its own part of each parameter to its place, or adds it to what is there.

        Args:
            own: this rank's, FP32, through the codec of the piece; it decodes its own bytes, too.
            flats: what is written to, FP32.
            onto: of each parameter, whether it is added.

        Raises:
            RankError: a rank is gone.
        """
        self._give(bucket, own, flats, onto)
        self._count(*giving(bucket.pieces, self._own, len(self.members)))

    def end(self, bucket: Bucket, raw: int, theory: float) -> None:
        """Counts a bucket that is reduced."""
        self._count(raw, theory)
        if bucket.measured:
            # What a NaN carries differs between instruction sets.
            made = torch.where(bucket.values.isnan(), torch.nan, bucket.values)
            self.digest = zlib.crc32(made.numpy().tobytes(), self.digest)

    def _count(self, raw: int, theory: float) -> None:
        self.tally.buckets += 1
        self.tally.raw += raw
        self.tally.theory += theory

    def fault(self, bucket: Bucket, sender: int, what: str) -> None:
        """Remembers that a message of a member, by its place, could not be read; all ranks are told at the end of the step."""
        self.faults.append(messages.unread(self.state.rank, self.members[sender], bucket.about, what))

    def settle(self, step: int, compared: bool = False, told: str = verdict.GRADIENTS) -> None:
        """Ends a step, whose buckets are all reduced; `compared` says whether what was made of them is counted as compared, and `told`
        what is said where it differs.

        Raises:
            RankError: on all ranks, if one could not read a message, or has made something else.
        """
        self.tally.steps += 1
        if self.state.world == 1:
            return
        faults, digest, finite = self.faults, self.digest, self.finite
        self.faults, self.digest, self.finite = [], 0, True
        rank, world = self.state.rank, self.state.world
        self.used = verdict.settle(self.group, rank, world, step, faults, digest, finite, told)
        self.state.settle(self.used)
        self.tally.checks += compared

    def _one_exchange(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        parts = [slice(0, piece.size) for piece in bucket.pieces]
        mine = self._encoded(bucket, flats, parts, "mine")
        rank, ranks = self._own, range(len(self.members))
        others = [peer for peer in ranks if peer != rank]
        theirs = {peer: self._memory_for(bucket, f"all of {peer}", mine.numel()) for peer in others}
        self._exchange(bucket, dict.fromkeys(others, mine), theirs)
        theirs[rank] = mine
        self._decode(bucket, flats, parts, [theirs[sender] for sender in ranks], first=0)
        for piece, flat in zip(bucket.pieces, flats, strict=True):
            piece.codec.settle(flat.div_(len(ranks)))

    def _two_exchanges(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        self._sum(bucket, flats)
        own = [flat[piece.part(self._own)] for piece, flat in zip(bucket.pieces, flats, strict=True)]
        self._give(bucket, own, flats, [False] * len(flats))

    def _sum(self, bucket: Bucket, flats: Sequence[Tensor]) -> None:
        """Puts the mean in the place of this rank's part."""
        rank, ranks = self._own, range(len(self.members))
        others = [peer for peer in ranks if peer != rank]
        parts = {owner: [piece.part(owner) for piece in bucket.pieces] for owner in ranks}
        mine = {owner: self._encoded(bucket, _cut(flats, parts[owner]), parts[owner], f"to {owner}") for owner in ranks}
        theirs = {peer: self._memory_for(bucket, f"from {peer}", mine[rank].numel()) for peer in others}
        self._exchange(bucket, {peer: mine[peer] for peer in others}, theirs)
        theirs[rank] = mine[rank]
        self._decode(bucket, flats, parts[rank], [theirs[sender] for sender in ranks], first=0)
        for flat in _cut(flats, parts[rank]):
            flat.div_(len(ranks))

    def _give(self, bucket: Bucket, own: Sequence[Tensor], flats: Sequence[Tensor], onto: Sequence[bool]) -> None:
        rank, ranks = self._own, range(len(self.members))
        others = [peer for peer in ranks if peer != rank]
        parts = {owner: [piece.part(owner) for piece in bucket.pieces] for owner in ranks}
        mine = self._encoded(bucket, own, parts[rank], "mean", summed=True)
        theirs = {
            owner: self._memory_for(bucket, f"mean of {owner}", self._length(bucket, parts[owner])) for owner in others
        }
        self._exchange(bucket, dict.fromkeys(others, mine), theirs)
        theirs[rank] = mine
        for owner in ranks:
            self._decode(bucket, flats, parts[owner], [theirs[owner]], first=owner, summed=True, onto=onto)

    def _encoded(
        self, bucket: Bucket, values: Sequence[Tensor], parts: Sequence[slice], name: str, summed: bool = False
    ) -> Tensor:
        """Returns a message with the values of these parts of a bucket."""
        begin = time.perf_counter()
        message = self._memory_for(bucket, name, self._length(bucket, parts))
        self._head(bucket, self._own, message, summed).write(message)
        at = HEADER
        for piece, found, part in zip(bucket.pieces, values, parts, strict=True):
            to = message[at : at + piece.nbytes(part)]
            at += to.numel()
            if part.start == part.stop:
                continue
            residual = self.state.residual(piece, part, summed)
            given = found if residual is None or not bucket.measured else found + residual
            draw = self.state.draw(piece, bucket.step, part.start, summed)
            piece.codec.encode(found, to, draw, residual)
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
        onto: Sequence[bool] = (),
    ) -> None:
        """Sums messages of the ranks from `first` on, in their order, into these parts of a bucket, or onto what is there."""
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
            for place, (piece, flat, part) in enumerate(zip(bucket.pieces, flats, parts, strict=True)):
                nbytes = piece.nbytes(part)
                if part.start != part.stop:
                    try:
                        add = number > 0 or (bool(onto) and onto[place])
                        piece.codec.decode(message[at : at + nbytes], flat[part], add)
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


def _cut(flats: Sequence[Tensor], parts: Sequence[slice]) -> list[Tensor]:
    return [flat[part] for flat, part in zip(flats, parts, strict=True)]
