"""Point-to-point messages between ranks over gloo, with headers, from host memory.

Messages are sent in chunks, so that coding and transfer overlap. Invariant: all receives are posted
before any send, as a send without its receive can halve the link rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, distributed

from qsync_fx.communication.bucket import ParameterSlice
from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.message_header import HEADER, MessageHeader
from qsync_fx.communication.transport import POINT_TO_POINT, HeaderFault, Sizes
from qsync_fx.errors import RankError


def rank_error(rank: int, description: str, where: str, do: str) -> RankError:
    """Return the error of a rank, with its number as an attribute."""
    error = RankError(description, where=where, do=do)
    error.rank = rank
    return error


class PendingTransfers:
    """Chunks in flight; all methods raise `RankError` if a rank is gone or the group timed out."""

    def __init__(self, group: Any, about: str) -> None:
        self._group, self._about = group, about
        self._coming: dict[tuple[int, int], Any] = {}
        self._going: dict[tuple[int, int], Any] = {}

    def expect(self, rank: int, message: Tensor, number: int = 0) -> None:
        """Post the receive of a chunk; call it before any send."""
        self._coming[rank, number] = self._tried(
            rank, lambda: distributed.irecv(message, group=self._group, group_src=rank, tag=number)
        )

    def send(self, rank: int, message: Tensor, number: int = 0) -> None:
        """Send a chunk; `message` must not change before `wait_sent` or `end`."""
        self._going[rank, number] = self._tried(
            rank, lambda: distributed.isend(message, group=self._group, group_dst=rank, tag=number)
        )

    def wait_received(self, rank: int, number: int = 0) -> None:
        self._tried(rank, self._coming.pop((rank, number)).wait)

    def wait_sent(self, rank: int, number: int = 0) -> None:
        self._tried(rank, self._going.pop((rank, number)).wait)

    def end(self) -> None:
        """Wait for all pending receives and sends."""
        for rank, number in list(self._coming):
            self.wait_received(rank, number)
        for rank, number in list(self._going):
            self.wait_sent(rank, number)

    def _tried(self, rank: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            text = f"rank {rank} no longer responds: {reason}"
            do = "find the cause in its log, and restart all ranks"
            raise rank_error(rank, text, self._about, do) from error


def exchange(
    group: Any, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], about: str
) -> None:
    """Send and receive one message per rank, as `PendingTransfers`; keys are ranks of the group."""
    transfers = PendingTransfers(group, about)
    for rank, message in incoming.items():
        transfers.expect(rank, message)
    for rank, message in outgoing.items():
        transfers.send(rank, message)
    transfers.end()


VALUES: Final = 2**20
"""Most values in a chunk, unless a codec unit is larger: 9 ms at 8 bits and 1 Gbps."""


@dataclass(frozen=True)
class Run:
    """Consecutive values of one parameter in a chunk."""

    place: int  # index of the parameter in its bucket
    values: slice  # within the parameter's part
    wire: slice  # bytes of the message


@dataclass(frozen=True)
class Chunk:
    """Bytes of a message that are sent together; the first chunk includes the header."""

    wire: slice
    runs: tuple[Run, ...]

    @property
    def coded(self) -> slice:
        """Slice of the coded bytes, without the header."""
        begin = next((run.wire.start for run in self.runs), self.wire.stop)
        return slice(begin, self.wire.stop)

    def within(self, run: Run) -> slice:
        """Return the slice of a run's bytes within `coded`."""
        begin = self.coded.start
        return slice(run.wire.start - begin, run.wire.stop - begin)


def chunks_of(
    pieces: Sequence[ParameterSlice],
    parts: Sequence[slice],
    most: int | None = None,
    most_bytes: int | None = None,
) -> list[Chunk]:
    """Return the chunks of a message with these parts of parameters.

    A chunk has at most `most` values, by default `VALUES`, and on average at most `most_bytes`.
    """
    most = most or VALUES
    if most_bytes is not None:
        sizes = [part.stop - part.start for part in parts]
        both = zip(pieces, sizes, strict=True)
        nbytes = sum(piece.codec.nbytes(size) for piece, size in both)
        most = max(min(most, most_bytes * sum(sizes) // max(nbytes, 1)), 1)
    result: list[Chunk] = []
    runs: list[Run] = []
    begin, end, room = 0, HEADER, most

    def close() -> None:
        nonlocal begin, room
        result.append(Chunk(slice(begin, end), tuple(runs)))
        runs.clear()
        begin, room = end, most

    for place, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        index, size, unit = 0, part.stop - part.start, piece.codec.unit
        while index < size:
            if room < min(unit, size - index) and runs:
                close()
            used = min(size - index, max(room // unit, 1) * unit)
            nbytes = piece.codec.nbytes(used)
            runs.append(Run(place, slice(index, index + used), slice(end, end + nbytes)))
            index, end, room = index + used, end + nbytes, room - used
    if runs or not result:
        close()
    return result


def sizes_of(chunks: Sequence[Chunk]) -> list[int]:
    """Return the coded bytes of each chunk, without the header."""
    return [chunk.coded.stop - chunk.coded.start for chunk in chunks]


class _Message:
    """Message in host memory, with its header, and views of its chunks."""

    def __init__(self, memory: Tensor, sizes: Sequence[int]) -> None:
        self.memory = memory[: HEADER + sum(sizes)]
        self.coded, self.sent, end = list[Tensor](), list[Tensor](), HEADER
        for number, nbytes in enumerate(sizes):
            begin, end = end, end + nbytes
            self.coded.append(self.memory[begin:end])
            # The first chunk includes the header.
            self.sent.append(self.memory[begin if number else 0 : end])


@dataclass
class PointToPoint:
    """Transport by messages in host memory, which gloo sends directly between ranks."""

    group: Any  # a process group that no other code uses
    members: Sequence[int]  # ranks of the group
    member_index: int  # index of this rank in `members`
    device: torch.device = CPU  # of the gradients
    name: str = field(default=POINT_TO_POINT, init=False)
    on_device: bool = field(default=False, init=False)
    chunk_bytes: int | None = field(default=None, init=False)
    _memory: dict[tuple[str, int], Tensor] = field(default_factory=dict, init=False)

    def scatter(self, header: MessageHeader, about: str, sizes: Sizes) -> PointToPointTransfer:
        outgoing = [
            self._outgoing("to", index, header, sizes[index]) for index in range(len(self.members))
        ]
        peers = [
            [index] if index != self.member_index else [] for index in range(len(self.members))
        ]
        coming = [sizes[self.member_index]] * len(self.members)
        return self._transfer(header, about, outgoing, peers, outgoing[self.member_index], coming)

    def gather(self, header: MessageHeader, about: str, sizes: Sizes) -> PointToPointTransfer:
        message = self._outgoing("mine", self.member_index, header, sizes[self.member_index])
        peers = [index for index in range(len(self.members)) if index != self.member_index]
        return self._transfer(header, about, [message], [peers], message, sizes)

    def faults(self) -> Sequence[HeaderFault]:
        return ()

    def __str__(self) -> str:
        return "point to point over gloo"

    def _transfer(
        self,
        header: MessageHeader,
        about: str,
        outgoing: Sequence[_Message],
        peers: Sequence[Sequence[int]],
        mine: _Message,
        coming: Sizes,
    ) -> PointToPointTransfer:
        incoming = [
            mine if index == self.member_index else self._message("from", index, sizes)
            for index, sizes in enumerate(coming)
        ]
        return PointToPointTransfer(self, header, about, outgoing, peers, incoming)

    def _outgoing(
        self, role: str, index: int, header: MessageHeader, sizes: Sequence[int]
    ) -> _Message:
        result = self._message(role, index, sizes)
        sender = self.members[self.member_index]
        replace(header, sender=sender, length=sum(sizes)).write(result.memory)
        return result

    def _message(self, role: str, index: int, sizes: Sequence[int]) -> _Message:
        # Buffers are reused, because allocation costs more than a copy.
        memory, nbytes = self._memory.get((role, index)), HEADER + sum(sizes)
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[role, index] = buffers.host(nbytes, self.device)
        return _Message(memory, sizes)


class PointToPointTransfer:
    """Messages in flight between the members of a `PointToPoint` transport."""

    def __init__(
        self,
        transport: PointToPoint,
        header: MessageHeader,
        about: str,
        outgoing: Sequence[_Message],
        peers: Sequence[Sequence[int]],
        incoming: Sequence[_Message],
    ) -> None:
        self._header, self._members = header, transport.members
        self._member_index = transport.member_index
        self._sent, self._peers, self._received = outgoing, peers, incoming
        self.outgoing = [message.coded for message in outgoing]
        self.incoming = [message.coded for message in incoming]
        both = zip(outgoing, peers, strict=True)
        self.nbytes = sum(message.memory.numel() * len(to) for message, to in both)
        self._transfers = PendingTransfers(transport.group, about)
        for index, message in enumerate(incoming):
            if index != self._member_index:
                for number, chunk in enumerate(message.sent):
                    self._transfers.expect(self._members[index], chunk, number)

    def send(self, message: int, number: int) -> None:
        chunks = self._sent[message].sent
        if number < len(chunks):
            for peer in self._peers[message]:
                self._transfers.send(self._members[peer], chunks[number], number)

    def wait(self, member: int, number: int) -> str | None:
        if member != self._member_index:
            self._transfers.wait_received(self._members[member], number)
        if number:
            return None
        memory = self._received[member].memory
        length, sender = memory.numel() - HEADER, self._members[member]
        return replace(self._header, sender=sender, length=length).fault(memory)

    def end(self) -> None:
        self._transfers.end()
