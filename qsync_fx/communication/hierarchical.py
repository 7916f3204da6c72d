"""Hierarchical all-reduce: FP32 within nodes, whose links are fast, and a codec between nodes.

Each rank reduces one shard of its node's gradients (reduce-scatter), averages it through the codec
with the ranks of the other nodes that have the same shard, and sends it to the ranks of its node
(all-gather). Invariant: all ranks end with the same bits. A shard is bit-identical on all nodes,
and ranks of a node copy it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qsync_fx.communication import bucket
from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import Bucket, ParameterSlice, volumes
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.communication.compressor_state import CompressorState
from qsync_fx.communication.point_to_point import StepOutcome
from qsync_fx.communication.statistics import CommunicationStatistics


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

    def node_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's node."""
        return next(node for node in self.ranks if rank in node)

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard, one of each node."""
        place = self.node_of(rank).index(rank)
        return tuple(node[place] for node in self.ranks)

    def __str__(self) -> str:
        nodes = "; ".join(", ".join(map(str, node)) for node in self.ranks)
        return f"{len(self.ranks)} nodes of {self.size} ranks: {nodes}"


@dataclass
class Hierarchy:
    """Reducer of buckets over nodes, with the interface of `Reducer`.

    Attributes:
        reducer: averages over the ranks of other nodes; its group contains all ranks.
    """

    nodes: NodeGroups
    reducer: Reducer

    def __post_init__(self) -> None:
        state, node = self.reducer.state, self.nodes.node_of(self.reducer.state.rank)
        codec = f"inside a node, {state.codec}"
        own_state = CompressorState(state.rank, state.world, codec, state.seed, state.device)
        self._inside = Reducer(self.reducer.group, own_state, node)
        self._place = node.index(state.rank)

    def share(self, piece: ParameterSlice) -> ParameterSlice:
        """Return the slice of a parameter that this rank averages between nodes."""
        part = self._in_node(piece).part(self._place)
        # Each shard has a random stream of its own.
        index = piece.index * self.nodes.size + self._place
        size, count = part.stop - part.start, len(self.nodes.ranks)
        return bucket.cut(piece.name, index, size, piece.codec, count)

    def reduce(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by their mean over all ranks."""
        flats = self.reducer.flats(bucket)
        pieces = [replace(self._in_node(piece), codec=PLAIN) for piece in bucket.pieces]
        plain = replace(bucket, pieces=pieces, measured=False)
        shares = [self.share(piece) for piece in bucket.pieces]
        parts = [piece.part(self._place) for piece in pieces]
        shards = [flat[part] for flat, part in zip(flats, parts, strict=True)]
        self._inside.reduce_scatter(plain, flats)
        self.reducer.mean(replace(bucket, pieces=shares), shards)
        self._inside.all_gather(plain, shards, flats)
        self._count()
        self.reducer.put_back(bucket, flats)
        rank = self.reducer.state.rank
        across = self.nodes.across(rank)
        self.reducer.end(bucket, *volumes(shares, across.index(rank), len(across)))

    def _in_node(self, piece: ParameterSlice) -> ParameterSlice:
        """Return a parameter, cut into one shard for each rank of a node."""
        return bucket.cut(piece.name, piece.index, piece.size, piece.codec, self.nodes.size)

    def _count(self) -> None:
        """Add the statistics and faults inside the node to those of the reducer."""
        tally, inside = self.reducer.tally, self._inside.tally
        tally.encode += inside.encode
        tally.decode += inside.decode
        tally.transfer += inside.transfer
        tally.inside += inside.wire
        self.reducer.outcome.faults += self._inside.outcome.faults
        self._inside.tally, self._inside.outcome = CommunicationStatistics(), StepOutcome()
