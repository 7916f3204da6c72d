"""Transports of coded messages between ranks: "point_to_point" over gloo, and "collective".

All ranks know the size of every message from the parameters and their codecs. Invariant: both
transports deliver the same coded bytes, so that results do not depend on the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from qsync_fx.communication.message_header import MessageHeader
from qsync_fx.predictor.replayer.cluster import TRANSPORTS

POINT_TO_POINT, COLLECTIVE = TRANSPORTS
"""Messages in host memory, sent in chunks over gloo, the only transport of variable lengths; and
collectives of the backend of the device, such as NCCL, for messages that stay on the device.
"""
AUTO: Final = "auto"

Sizes = Sequence[Sequence[int]]
"""Bytes of the chunks of messages, by member and chunk."""


@dataclass(frozen=True)
class HeaderFault:
    """Header of a message that does not match the exchange in which it arrived."""

    about: str
    sender: int  # rank
    description: str


class Transfer(Protocol):
    """Exchange in flight. Its methods raise `RankError` if a rank does not respond."""

    @property
    def outgoing(self) -> Sequence[Sequence[Tensor]]:
        """Bytes to send, uint8, by message and chunk; write a chunk before `send`."""

    @property
    def incoming(self) -> Sequence[Sequence[Tensor]]:
        """Received bytes, uint8, by member and chunk; read a chunk after `wait`."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to other ranks, with headers and padding."""

    def send(self, message: int, number: int) -> None:
        """Send a chunk. Call it for chunk 0 of all messages in order, then for chunk 1, ...

        Call it, too, for chunks that a message does not have; they are not sent.
        """

    def wait(self, member: int, number: int) -> str | None:
        """Wait for a chunk of a member; return a fault of its header, if already known.

        On a GPU, only the current stream waits.
        """

    def end(self) -> None:
        """Wait until no chunk is in flight."""


class Transport(Protocol):
    """Exchange of messages between the members of a group, one exchange after another."""

    @property
    def name(self) -> str:
        """Name in `TRANSPORTS`."""

    @property
    def on_device(self) -> bool:
        """Whether messages are in the memory of the device of the gradients."""

    @property
    def chunk_bytes(self) -> int | None:
        """Most bytes of a chunk on average; None: only `point_to_point.VALUES` limits chunks."""

    def scatter(self, header: MessageHeader, about: str, sizes: Sizes) -> Transfer:
        """Start to send message i to member i; all messages to member i have `sizes[i]`.

        The message of a rank to itself is not sent; it has the same memory in `incoming`.
        """

    def gather(self, header: MessageHeader, about: str, sizes: Sizes) -> Transfer:
        """Start to send one message, with `sizes` of this rank, to all members."""

    def faults(self) -> Sequence[HeaderFault]:
        """Return the faults of headers since the last call that `Transfer.wait` did not return."""

    def __str__(self) -> str:
        """Return the description in reports."""
