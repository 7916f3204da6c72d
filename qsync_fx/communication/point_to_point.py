"""Point-to-point messages between ranks: headers, chunks, transfers, and the check of a step.

Messages are sent in chunks, so that coding and transfer overlap. Chunk boundaries follow from the
parameters and parts of a message, and are multiples of codec units: all ranks cut a message
equally, and the cuts do not change the coded values. Values on a GPU are coded there, and each
chunk is copied to or from the host.

Invariant: all receives are posted before any send, as a send without its receive can halve the link
rate. A message of another step, bucket or codec is never decoded. `settle` lets all ranks continue,
or raises the same error on all of them.
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
    """Header of a message.

    Attributes:
        codec: hash of the codec description that the ranks agree on.
        sender: rank of the sender.
        bucket, step: origin of the values; `bucket` also encodes the phase (reduce-scatter or
            all-gather).
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
        """Return how a received header differs from this one; None if it is equal."""
        magic, *result = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))
        if magic != _MAGIC:
            return f"it begins with {magic.hex()} instead of {_MAGIC.hex()}"
        for header_field, value in zip(fields(self), result, strict=True):
            if value != (expected := getattr(self, header_field.name)):
                return f"its {header_field.name} is {value} instead of {expected}"
        return None


def length_of(message: Tensor) -> int:
    """Return the length in the header of a message, in bytes."""
    length: int = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))[-1]
    return length


def unread(rank: int, sender: int, about: str, fault: str) -> str:
    """Return the error message for a message that a rank could not read."""
    return f"rank {rank} cannot read the message of rank {sender} for {about}: {fault}"


def hash_of(text: str) -> int:
    """Return the CRC-32 of a text."""
    return zlib.crc32(text.encode())


class PendingTransfers:
    """Chunks in flight; they may arrive in any order.

    Args:
        group: process group of the ranks.
        about: location for error messages.
    """

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
        """Send a chunk; `message` must not change before `gone` or `end`."""
        self._going[rank, number] = self._tried(
            rank, lambda: distributed.isend(message, group=self._group, group_dst=rank, tag=number)
        )

    def arrived(self, rank: int, number: int = 0) -> None:
        """Wait until a chunk is received.

        Raises:
            RankError: the rank is gone, or the group's timeout expired.
        """
        self._tried(rank, self._coming.pop((rank, number)).wait)

    def gone(self, rank: int, number: int = 0) -> None:
        """Wait until a chunk is sent.

        Raises:
            RankError: the rank is gone, or the group's timeout expired.
        """
        self._tried(rank, self._going.pop((rank, number)).wait)

    def end(self) -> None:
        """Wait for all pending receives and sends.

        Raises:
            RankError: a rank is gone, or the group's timeout expired.
        """
        for rank, number in list(self._coming):
            self.arrived(rank, number)
        for rank, number in list(self._going):
            self.gone(rank, number)

    def _tried(self, rank: int, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except RuntimeError as error:
            reason, *_ = str(error).strip().splitlines() or ["no reason given"]
            result = RankError(
                f"rank {rank} no longer responds: {reason}",
                where=self._about,
                do="find the cause in its log, and restart all ranks",
            )
            result.rank = rank
            raise result from error


def exchange(
    group: Any, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], about: str
) -> None:
    """Send and receive one message per rank; keys are ranks of the group.

    Raises:
        RankError: a rank is gone, or the group's timeout expired.
    """
    flight = PendingTransfers(group, about)
    for rank, message in incoming.items():
        flight.expect(rank, message)
    for rank, message in outgoing.items():
        flight.send(rank, message)
    flight.end()


VALUES: Final = 2**20
"""Most values in a chunk, unless a codec unit is larger.

At 8 bits, such a chunk takes 9 ms at 1 Gbps and 1 to 2 ms of coding; the overhead of a chunk is 0.1
ms.
"""


@dataclass(frozen=True)
class Run:
    """Consecutive values of one parameter in a chunk.

    Attributes:
        place: index of the parameter in its bucket.
        values: slice within the parameter's part of the message.
        wire: slice of its bytes in the message.
    """

    place: int
    values: slice
    wire: slice


@dataclass(frozen=True)
class Chunk:
    """Bytes of a message that are sent together; the first chunk includes the header."""

    wire: slice
    runs: tuple[Run, ...]

    @property
    def coded(self) -> slice:
        """Slice of the coded bytes, without the header."""
        return (
            slice(self.runs[0].wire.start, self.wire.stop)
            if self.runs
            else slice(self.wire.stop, self.wire.stop)
        )

    def within(self, run: Run) -> slice:
        """Return the slice of a run's bytes within `coded`."""
        begin = self.coded.start
        return slice(run.wire.start - begin, run.wire.stop - begin)


def stretches(
    pieces: Sequence[ParameterSlice], parts: Sequence[slice], most: int | None = None
) -> list[Chunk]:
    """Return the chunks of a message with these parts of parameters.

    Args:
        most: most values in a chunk; `VALUES` by default.
    """
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
GRADIENTS: Final = "the averaged gradients of rank {} differ from those of rank {}"


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
    """Exchange the outcome of a step; return whether all ranks have finite gradients.

    Args:
        reported: error message for different digests, with two placeholders for ranks.

    Raises:
        RankError: on all ranks, if one could not read a message or has another digest.
    """
    # The fault is cut as text: a cut in its bytes could fall within a character.
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
                do="check that all ranks run the same version and that the network works; resume "
                "from the last checkpoint",
            )
            error.rank = sender
            raise error
    digests = [text[sender]["digest"] for sender in range(world)]
    usual, count = Counter(digests).most_common(1)[0]
    if count != world:
        other = next(sender for sender in range(world) if digests[sender] != usual)
        error = RankError(
            f"{reported.format(other, digests.index(usual))}; they must be bit-identical",
            where=f"step {step}",
            do="resume from the last checkpoint; if the error recurs, suspect a bug in qsync_fx or "
            "a faulty processor",
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
            "fault": "the message of a rank at the end of a step cannot be read",
            "digest": 0,
            "finite": True,
        }
    return (
        result
        if isinstance(result, dict)
        else {"fault": "the message of a rank has no outcome", "digest": 0, "finite": True}
    )


Fault = Callable[[int, str], None]
"""Callback for a wrong message: index of the sending member, and a description."""


@dataclass(frozen=True)
class OutgoingMessage:
    """Message to send, in chunks.

    Attributes:
        memory: its bytes, uint8 on the host; the header is written.
        parts: for each parameter of the bucket, the slice of values in the message.
        values: values of each part, FP32.
        residuals: error feedback of each part; None if the codec has none.
        summed: whether the values are a mean.
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
        """Encode a chunk, and measure the coding error if the bucket is measured."""
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
    """Messages in chunks, with the same parts of a bucket, to be summed or averaged.

    Attributes:
        messages: bytes by member index, in summation order, including this rank's own.
        values: output of each part, FP32.
        summed: whether the messages are means.
        onto: for each parameter, whether the sum is added to `values`; empty for none.
        over: divisor of the sum.
        unread: members whose message was not the expected one.
    """

    stretches: Sequence[Chunk]
    messages: Mapping[int, Tensor]
    values: Sequence[Tensor]
    summed: bool = False
    onto: Sequence[bool] = ()
    over: int = 1
    unread: set[int] = field(default_factory=set)

    def look(self, head: Callable[[int, Tensor, bool], MessageHeader], fault: Fault) -> None:
        """Compare headers with the expected ones, which `head` returns."""
        for sender, message in self.messages.items():
            if (subject := head(sender, message, self.summed).fault(message)) is not None:
                fault(sender, subject)
                self.unread.add(sender)

    def decode(
        self, bucket: Bucket, number: int, tally: CommunicationStatistics, fault: Fault
    ) -> None:
        """Decode and sum a chunk of all messages."""
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
