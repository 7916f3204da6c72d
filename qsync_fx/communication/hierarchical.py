"""Hierarchical all-reduce: FP32 within nodes, whose links are fast, and a codec between nodes.

Each rank reduces one shard of its node's gradients (reduce-scatter), averages it through the codec
with the ranks of the other nodes that have the same shard, and sends it to the ranks of its node
(all-gather). Each value thus leaves a node once, and all ranks of the node share the sending.

Invariant: all ranks end with the same bits. `Reducer` makes a shard bit-identical on all nodes, and
ranks of a node copy it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qsync_fx.communication import bucket, point_to_point
from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import Bucket, ParameterSlice, volumes
from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.point_to_point import HEADER, MessageHeader, exchange


@dataclass(frozen=True)
class NodeGroups:
    """Ranks of each node.

    Attributes:
        ranks: for each node its ranks, ascending; the same number on all nodes.
    """

    ranks: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranks[0])

    def beside(self, rank: int) -> tuple[int, ...]:
        return next(node for node in self.ranks if rank in node)

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard, one of each node."""
        place = self.beside(rank).index(rank)
        return tuple(node[place] for node in self.ranks)

    def __str__(self) -> str:
        return f"{len(self.ranks)} nodes of {self.size} ranks: {'; '.join(', '.join(map(str, node)) for node in self.ranks)}"


@dataclass
class Hierarchy:
    """Reducer of buckets over nodes, with the interface of `Reducer`.

    Attributes:
        nodes: ranks of each node.
        reducer: averages over the ranks of other nodes; its group contains all ranks.
    """

    nodes: NodeGroups
    reducer: Reducer
    _memory: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank = self.reducer.state.rank
        self._beside = self.nodes.beside(rank)
        self._place = self._beside.index(rank)

    def share(self, piece: ParameterSlice) -> ParameterSlice:
        """Return the slice of a parameter that this rank averages between nodes."""
        size = self.nodes.size
        part = self._whole(piece).part(self._place)
        index = piece.index * size + self._place  # a separate random stream for each part
        return bucket.cut(
            piece.name, index, part.stop - part.start, piece.codec, len(self.nodes.ranks)
        )

    def reduce(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by their mean over all ranks.

        Raises:
            RankError: a rank is gone.
        """
        flats, wholes = self.reducer.flats(bucket), [self._whole(piece) for piece in bucket.pieces]
        shares = [self.share(piece) for piece in bucket.pieces]
        owned = [flat[full.part(self._place)] for flat, full in zip(flats, wholes, strict=True)]
        self._sum(bucket, flats, wholes, owned)
        self.reducer.mean(replace(bucket, pieces=shares), owned)
        self._give(bucket, flats, wholes, owned)
        self.reducer.put_back(bucket, flats)
        across = self.nodes.across(self.reducer.state.rank)
        self.reducer.end(
            bucket, *volumes(shares, across.index(self.reducer.state.rank), len(across))
        )

    def _whole(self, piece: ParameterSlice) -> ParameterSlice:
        return bucket.cut(piece.name, piece.index, piece.size, piece.codec, self.nodes.size)

    def _sum(
        self,
        bucket: Bucket,
        flats: Sequence[Tensor],
        wholes: Sequence[ParameterSlice],
        owned: Sequence[Tensor],
    ) -> None:
        """Write the node's mean into this rank's shards, summed in rank order."""
        mine = {
            place: self._message(
                bucket,
                f"to {place}",
                [f[w.part(place)] for f, w in zip(flats, wholes, strict=True)],
            )
            for place in range(self.nodes.size)
        }
        length = mine[self._place].numel()
        theirs = {
            place: self._bytes(bucket, f"from {place}", length)
            for place in mine
            if place != self._place
        }
        self._exchange(bucket, {place: mine[place] for place in theirs}, theirs)
        theirs[self._place] = mine[self._place]
        begin = time.perf_counter()
        good = [
            place for place in range(self.nodes.size) if self._sound(bucket, place, theirs[place])
        ]
        for number, place in enumerate(good):
            for part, sent in zip(owned, self._parts(theirs[place], owned), strict=True):
                part.copy_(sent) if number == 0 else part.add_(sent.to(part.device))
        for part in owned:
            part.div_(self.nodes.size)
        self.reducer.tally.decode += time.perf_counter() - begin

    def _give(
        self,
        bucket: Bucket,
        flats: Sequence[Tensor],
        wholes: Sequence[ParameterSlice],
        owned: Sequence[Tensor],
    ) -> None:
        """Receive the shards that the other ranks of the node have averaged."""
        mine = self._message(bucket, "mean", owned)
        parts = {
            place: [flat[full.part(place)] for flat, full in zip(flats, wholes, strict=True)]
            for place in range(self.nodes.size)
            if place != self._place
        }
        theirs = {
            place: self._bytes(
                bucket, f"mean of {place}", HEADER + 4 * sum(part.numel() for part in item)
            )
            for place, item in parts.items()
        }
        self._exchange(bucket, dict.fromkeys(theirs, mine), theirs)
        for place, result in parts.items():
            if self._sound(bucket, place, theirs[place]):
                for part, sent in zip(result, self._parts(theirs[place], result), strict=True):
                    part.copy_(sent)

    def _message(self, bucket: Bucket, name: str, parts: Sequence[Tensor]) -> Tensor:
        begin = time.perf_counter()
        message = self._bytes(bucket, name, HEADER + 4 * sum(part.numel() for part in parts))
        self._head(bucket, self._place, message).write(message)
        for part, to in zip(parts, self._parts(message, parts), strict=True):
            to.copy_(part)
        self.reducer.tally.encode += time.perf_counter() - begin
        return message

    @staticmethod
    def _parts(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the FP32 values of a message, split to the sizes of `like`."""
        return list(
            torch.split(message[HEADER:].view(torch.float32), [part.numel() for part in like])
        )

    def _exchange(
        self, bucket: Bucket, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> None:
        begin, ranks = time.perf_counter(), self._beside
        inputs, used = (
            {ranks[index]: item for index, item in item.items()} for item in (outgoing, incoming)
        )
        exchange(self.reducer.group, inputs, used, bucket.about)
        self.reducer.tally.transfer += time.perf_counter() - begin
        self.reducer.tally.inside += sum(message.numel() for message in outgoing.values())

    def _sound(self, bucket: Bucket, place: int, message: Tensor) -> bool:
        """Return whether a message is the expected one; record a fault if it is not."""
        fault = self._head(bucket, place, message).fault(message)
        if fault is not None:
            state = self.reducer.state
            self.reducer.faults.append(
                point_to_point.unread(state.rank, self._beside[place], bucket.about, fault)
            )
        return fault is None

    def _head(self, bucket: Bucket, place: int, message: Tensor) -> MessageHeader:
        subject = point_to_point.hash_of(f"inside a node, {self.reducer.state.codec}")
        return MessageHeader(
            subject, self._beside[place], bucket.index, bucket.step, message.numel() - HEADER
        )

    def _bytes(self, bucket: Bucket, name: str, nbytes: int) -> Tensor:
        """Return a host buffer that is reused across steps."""
        result = self._memory.get((bucket.index, name))
        if result is None or result.numel() != nbytes:
            result = self._memory[bucket.index, name] = buffers.host(
                nbytes, self.reducer.state.device
            )
        return result
