"""A message that a rank sends, and messages that it sums, of the values of a bucket, stretch by stretch.

What lies on another device than the CPU is coded there, and its bytes come to the host, or from it, a stretch at once.

Invariant: sums are taken in the order of the members, whatever comes first; of a message that is not the one awaited nothing is taken.

What stands before the bytes that ranks send each other, and what a receiver makes of it.

Invariant: a message that is not the one awaited, from another step, another bucket or another codec, is never decoded; who reads it says
in what it differs.

How ranks send each other bytes: every pair at once, over a process group of our own.

Invariant: every receive is posted before any send, as a send whose receive is not there yet can halve the rate of a link. A rank that does
not answer is named.

Messages in stretches, so that a link works while values are coded: one is sent while the next is encoded, and read while others come.

Invariant: where a message is cut follows from its parameters and the parts of them that it holds, so that all ranks cut it alike; values
are cut where units of their codec end, so that what becomes of them does not depend on it.

What ranks tell each other at the end of a step: whether all messages could be read, whether gradients
are finite, and, now and then, a hash of what they made.

Invariant: either all ranks go on, or all raise the same error.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import torch
from torch import Tensor, distributed

from qsync_fx.communication.bucket import Bucket, ParameterSlice
from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.compressor_state import CompressorState
from qsync_fx.communication.statistics import CommunicationStatistics
from qsync_fx.errors import RankError

_LAYOUT = struct.Struct("<4sIIIQQ")
_MAGIC = b"QSC1"
HEADER = _LAYOUT.size


@dataclass(frozen=True)
class MessageHeader:
    """Attributes:
    codec: a hash of what the ranks have agreed on.
    sender: a rank.
    bucket, step: what the values are of; a bucket also says which of its two exchanges.
    length: bytes after the header.
    """

    codec: int
    sender: int
    bucket: int
    step: int
    length: int

    def write(self, message: Tensor) -> None:
        packed = _LAYOUT.pack(_MAGIC, self.codec, self.sender, self.bucket, self.step, self.length)
        message[:HEADER] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def fault(self, message: Tensor) -> str | None:
        """Returns in what the header of a message differs from this one; None where it does not."""
        magic, *result = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))
        if magic != _MAGIC:
            return f"it begins with {magic.hex()} in place of {_MAGIC.hex()}"
        for header_field, value in zip(fields(self), result, strict=True):
            if value != (expected := getattr(self, header_field.name)):
                return f"its {header_field.name} is {value} in place of {expected}"
        return None


def length_of(message: Tensor) -> int:
    """Returns how many bytes a message says that it has."""
    length: int = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))[-1]
    return length


def unread(rank: int, sender: int, about: str, fault: str) -> str:
    """Returns what a rank tells of a message that it could not read."""
    return f"rank {rank} cannot read what rank {sender} sent of {about}: {fault}"


def hash_of(text: str) -> int:
    """Returns 32 bits that tell texts apart."""
    return zlib.crc32(text.encode())


class PendingTransfers:
    """Messages under way, each in one stretch or several, which come in any order."""

    def __init__(self, group: Any, about: str) -> None:
        """Args:
        group: whose ranks these are.
        about: what an error says of where it was.
        """
        self._group, self._about = group, about
        self._coming: dict[tuple[int, int], Any] = {}
        self._going: dict[tuple[int, int], Any] = {}

    def expect(self, rank: int, message: Tensor, number: int = 0) -> None:
        """Receives a stretch from a rank; before anything is sent."""
        self._coming[rank, number] = self._tried(
            rank, lambda: distributed.irecv(message, group=self._group, group_src=rank, tag=number)
        )

    def send(self, rank: int, message: Tensor, number: int = 0) -> None:
        """Sends a stretch to a rank; it stays as it is until `gone`, or `end`."""
        self._going[rank, number] = self._tried(
            rank, lambda: distributed.isend(message, group=self._group, group_dst=rank, tag=number)
        )

    def arrived(self, rank: int, number: int = 0) -> None:
        """Returns when a stretch is here.

        Raises:
            RankError: the rank is gone, or takes longer than the group may.
        """
        self._tried(rank, self._coming.pop((rank, number)).wait)

    def gone(self, rank: int, number: int = 0) -> None:
        """Returns when a stretch is sent.

        Raises:
            RankError: the rank is gone, or takes longer than the group may.
        """
        self._tried(rank, self._going.pop((rank, number)).wait)

    def end(self) -> None:
        """Returns when all that was expected is here, and all that was sent is gone.

        Raises:
            RankError: a rank is gone, or takes longer than the group may.
        """
        for rank, number in list(self._coming):
            self.arrived(rank, number)
        for rank, number in list(self._going):
            self.gone(rank, number)

    def _tried(self, rank: int, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except RuntimeError as error:
            reason, *_ = str(error).strip().splitlines() or ["no reason is given"]
            result = RankError(
                f"rank {rank} does not answer any more: {reason}",
                where=self._about,
                do="see in its log why, and start all ranks again",
            )
            result.rank = rank
            raise result from error


def exchange(
    group: Any, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], about: str
) -> None:
    """Sends and receives; ranks are those of the group.

    Raises:
        RankError: a rank is gone, or takes longer than the group may.
    """
    flight = PendingTransfers(group, about)
    for rank, message in incoming.items():
        flight.expect(rank, message)
    for rank, message in outgoing.items():
        flight.send(rank, message)
    flight.end()


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
class Chunk:
    """Bytes of a message that are sent at once, and what is in them; those of the first begin with the head."""

    wire: slice
    runs: tuple[Run, ...]

    @property
    def coded(self) -> slice:
        """The bytes of what is in it, without the head."""
        return (
            slice(self.runs[0].wire.start, self.wire.stop)
            if self.runs
            else slice(self.wire.stop, self.wire.stop)
        )

    def within(self, run: Run) -> slice:
        """Returns where the bytes of a run lie among those."""
        begin = self.coded.start
        return slice(run.wire.start - begin, run.wire.stop - begin)


def stretches(
    pieces: Sequence[ParameterSlice], parts: Sequence[slice], most: int | None = None
) -> list[Chunk]:
    """Returns a message that holds these parts of parameters, after its head, in stretches of at most `most` values."""
    most = VALUES if most is None else most
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


_SIZE = 512
GRADIENTS: Final = "the gradients of rank {} are not those of rank {} after they were averaged"


def settle(
    group: Any,
    rank: int,
    world: int,
    step: int,
    faults: list[str],
    digest: int,
    finite: bool = True,
    reported: str = GRADIENTS,
) -> bool:
    """Returns, once all ranks have said that they could read everything, and have the same digest, whether all have finite gradients.

    Args:
        told: what is said of two ranks where the digest of the first is another.

    Raises:
        RankError: on all ranks, if one could not, or has another.
    """
    # What is told is cut as a text, as bytes of it may end within a letter.
    mine = _packed(
        {"fault": faults[0][:300] if faults else None, "digest": digest, "finite": finite}
    )
    peers = [peer for peer in range(world) if peer != rank]
    theirs = {peer: torch.empty(_SIZE, dtype=torch.uint8) for peer in peers}
    exchange(group, dict.fromkeys(peers, mine), theirs, f"the end of step {step}")
    text = {peer: _unpacked(message) for peer, message in theirs.items()}
    text[rank] = _unpacked(mine)
    for sender in range(world):
        if (fault := text[sender]["fault"]) is not None:
            error = RankError(
                fault,
                where=f"the end of step {step}, on all ranks",
                do="see that all ranks run the same version, and that the network is sound; go on from the last checkpoint",
            )
            error.rank = sender
            raise error
    digests = [text[sender]["digest"] for sender in range(world)]
    usual, count = Counter(digests).most_common(1)[0]
    if count != world:
        other = next(sender for sender in range(world) if digests[sender] != usual)
        error = RankError(
            f"{reported.format(other, digests.index(usual))}, to the last bit",
            where=f"step {step}",
            do="go on from the last checkpoint; if it comes again, it is a bug in qsync_fx or a processor that errs",
        )
        error.rank = other
        raise error
    return all(text[sender]["finite"] for sender in range(world))


def _packed(value: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(value, ensure_ascii=True).encode()[:_SIZE]
    return torch.frombuffer(bytearray(text.ljust(_SIZE)), dtype=torch.uint8)


def _unpacked(message: torch.Tensor) -> dict[str, Any]:
    try:
        result = json.loads(bytes(message.numpy()))
    except ValueError:
        return {
            "fault": "what a rank told at the end of a step cannot be read",
            "digest": 0,
            "finite": True,
        }
    return (
        result
        if isinstance(result, dict)
        else {"fault": "what a rank told is no verdict", "digest": 0, "finite": True}
    )


Fault = Callable[[int, str], None]
"""What is called with the place of a member whose message is wrong, and with what is."""


@dataclass(frozen=True)
class OutgoingMessage:
    """A message of this rank.

    Attributes:
        memory: its bytes, the head written.
        stretches: in which it goes.
        parts: of each parameter of a bucket, which values it holds.
        values: these, FP32.
        residuals: what was left of them; None where a codec leaves nothing.
        summed: whether they are a mean already.
    """

    memory: Tensor
    stretches: Sequence[Chunk]
    parts: Sequence[slice]
    values: Sequence[Tensor]
    residuals: Sequence[Tensor | None]
    summed: bool

    def encode(
        self, bucket: Bucket, number: int, state: CompressorState, tally: CommunicationStatistics
    ) -> None:
        """Writes a stretch."""
        begin = time.perf_counter()
        stretch = self.stretches[number]
        sent = self.memory[stretch.coded]
        like = self.values[0] if self.values else sent
        near = buffers.beside(sent, like)
        for run in stretch.runs:
            piece, residual = bucket.pieces[run.place], self.residuals[run.place]
            values, to = self.values[run.place][run.values], near[stretch.within(run)]
            residual = None if residual is None else residual[run.values]
            full = values if residual is None or not bucket.measured else values + residual
            first = self.parts[run.place].start + run.values.start
            piece.codec.encode(
                values, to, state.draw(piece, bucket.step, first, self.summed), residual
            )
            if bucket.measured and not self.summed:
                tally.measure(full, piece.codec, to)
        if near is not sent:
            sent.copy_(near)
        tally.encode += time.perf_counter() - begin


@dataclass(frozen=True)
class IncomingMessages:
    """Messages with the same parts of a bucket, of which the sum or the mean is taken.

    Attributes:
        stretches: in which they come.
        messages: by the place of the member that sends it, in the order in which they are summed; this rank's own among them.
        values: what they are summed to, FP32.
        summed: whether they are a mean already.
        onto: of each parameter, whether they are added to what is there; else none is.
        over: what their sum is divided by.
        unread: of whom the message is none that was awaited.
    """

    stretches: Sequence[Chunk]
    messages: Mapping[int, Tensor]
    values: Sequence[Tensor]
    summed: bool = False
    onto: Sequence[bool] = ()
    over: int = 1
    unread: set[int] = field(default_factory=set)

    def look(self, head: Callable[[int, Tensor, bool], MessageHeader], fault: Fault) -> None:
        """Looks whether messages are those awaited, whose heads `head` returns."""
        for sender, message in self.messages.items():
            if (subject := head(sender, message, self.summed).fault(message)) is not None:
                fault(sender, subject)
                self.unread.add(sender)

    def decode(
        self, bucket: Bucket, number: int, tally: CommunicationStatistics, fault: Fault
    ) -> None:
        """Sums a stretch."""
        begin = time.perf_counter()
        good = [
            (sender, message)
            for sender, message in self.messages.items()
            if sender not in self.unread
        ]
        stretch = self.stretches[number]
        runs = stretch.runs
        for order, (sender, message) in enumerate(good):
            near = buffers.taken_to(message[stretch.coded], self.values[0]) if runs else message
            last = order + 1 == len(good) and self.over == 1
            for run in runs:
                add = order > 0 or (bool(self.onto) and self.onto[run.place])
                try:
                    codec, values = (
                        bucket.pieces[run.place].codec,
                        self.values[run.place][run.values],
                    )
                    codec.decode(near[stretch.within(run)], values, add, last)
                except ValueError as error:
                    fault(sender, str(error))
        if self.over > 1:
            for run in runs:
                self.values[run.place][run.values].div_(self.over)
        if runs:
            buffers.finished(self.values[0])
        tally.decode += time.perf_counter() - begin
