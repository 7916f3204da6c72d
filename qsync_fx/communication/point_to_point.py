"""Point-to-point messages between ranks: headers, chunks, transfers, and the check of a step.

Messages are sent in chunks, so that coding and transfer overlap. Invariant: all receives are posted
before any send, as a send without its receive can halve the link rate.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, distributed

from qsync_fx.communication.bucket import ParameterSlice
from qsync_fx.errors import RankError

_LAYOUT = struct.Struct("<4sIIIQQ")
_MAGIC = b"QSC1"
HEADER = _LAYOUT.size


@dataclass(frozen=True)
class MessageHeader:
    """Header of a message, with the CRC-32 of the codecs that the ranks agree on."""

    codec: str
    sender: int
    bucket: int  # index and phase (reduce-scatter or all-gather)
    step: int
    length: int  # bytes after the header

    def write(self, message: Tensor) -> None:
        packed = _LAYOUT.pack(_MAGIC, *self._numbers().values())
        message[:HEADER] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def fault(self, message: Tensor) -> str | None:
        """Return how a received header differs from this one; None if it is equal."""
        magic, *received = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))
        if magic != _MAGIC:
            return f"it begins with {magic.hex()} instead of {_MAGIC.hex()}"
        for (name, expected), value in zip(self._numbers().items(), received, strict=True):
            if value != expected:
                return f"its {name} is {value} instead of {expected}"
        return None

    def _numbers(self) -> dict[str, int]:
        return {**vars(self), "codec": zlib.crc32(self.codec.encode())}


def length_of(message: Tensor) -> int:
    """Return the length in the header of a message, in bytes."""
    return int(_LAYOUT.unpack(bytes(message[:HEADER].numpy()))[-1])


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
            raise _rank_error(rank, text, self._about, do) from error


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
    pieces: Sequence[ParameterSlice], parts: Sequence[slice], most: int | None = None
) -> list[Chunk]:
    """Return the chunks of at most `most` values of a message with these parts of parameters."""
    most = most or VALUES
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


GRADIENTS: Final = "the averaged gradients of rank {} differ from those of rank {}"
_OUTCOME = struct.Struct("<4s?I")
_OUTCOME_BYTES = 512


@dataclass
class StepOutcome:
    """Outcome of a step on one rank, which all ranks exchange."""

    faults: list[str] = field(default_factory=list)  # the first is sent, cut to 500 bytes
    digest: int = 0  # CRC-32 of the results that ranks compare
    finite: bool = True

    def packed(self) -> Tensor:
        text = "".join(self.faults[:1]).encode()
        packed = _OUTCOME.pack(_MAGIC, self.finite, self.digest) + text
        fixed = packed[:_OUTCOME_BYTES].ljust(_OUTCOME_BYTES, b"\0")
        return torch.frombuffer(bytearray(fixed), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, message: Tensor) -> StepOutcome:
        content = bytes(message.numpy())
        magic, finite, digest = _OUTCOME.unpack_from(content)
        if magic != _MAGIC:
            return cls(["the message of a rank at the end of a step cannot be read"])
        # The cut may fall within a character.
        text = content[_OUTCOME.size :].rstrip(b"\0").decode(errors="ignore")
        return cls(list(filter(None, [text])), digest, finite)


def settle(
    group: Any, rank: int, world: int, step: int, outcome: StepOutcome, reported: str = GRADIENTS
) -> bool:
    """Exchange the outcome of a step; return whether all ranks have finite gradients.

    Raise `RankError` on all ranks if one cannot read a message, or, as `reported`, digests differ.
    """
    mine = outcome.packed()
    messages = {peer: torch.empty_like(mine) for peer in range(world) if peer != rank}
    exchange(group, dict.fromkeys(messages, mine), messages, f"the end of step {step}")
    messages[rank] = mine
    outcomes = [StepOutcome.unpacked(messages[sender]) for sender in range(world)]
    for sender, item in enumerate(outcomes):
        if item.faults:
            where = f"the end of step {step}, on all ranks"
            do = "check the version on all ranks and the network; resume from the last checkpoint"
            raise _rank_error(sender, item.faults[0], where, do)
    digests = [item.digest for item in outcomes]
    usual, count = Counter(digests).most_common(1)[0]
    if count != world:
        other = next(sender for sender in range(world) if digests[sender] != usual)
        description = f"{reported.format(other, digests.index(usual))}; they must be bit-identical"
        do = "resume from the last checkpoint; if it recurs, suspect qsync_fx or a faulty processor"
        raise _rank_error(other, description, f"step {step}", do)
    return all(item.finite for item in outcomes)


def _rank_error(rank: int, description: str, where: str, do: str) -> RankError:
    error = RankError(description, where=where, do=do)
    error.rank = rank
    return error
