"""Exchange of coded gradients by collectives of the device's backend, such as NCCL.

A bucket's reduce-scatter is an all-to-all, its all-gather an all-gather (between two ranks an
all-to-all), one for each chunk, of coded bytes that stay in the memory of the device. Headers
travel over a gloo group at the end of a step. Invariant: between two ends of a step, the host does
not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from qsync_fx.communication.message_header import HEADER, MessageHeader
from qsync_fx.communication.point_to_point import exchange
from qsync_fx.communication.step_outcome import StepOutcome, settle
from qsync_fx.communication.transport import COLLECTIVE, HeaderFault, Sizes

ALL_GATHER: Any = getattr(distributed, "all_gather_single", None)
"""All-gather into one tensor, by the name that torch has for it since 2.13."""
if ALL_GATHER is None:
    ALL_GATHER = distributed.all_gather_into_tensor


def chunk_bytes(device: torch.device) -> int | None:
    """Return the largest number of bytes of a message in a collective; None for no limit."""
    # gloo runs two collectives at once, and each uses one direction of a link after the other,
    # so that a link idles for the time of a chunk. Smaller chunks cost more processor time.
    return 2**20 if device.type == "cpu" else None


@dataclass(frozen=True)
class CollectiveGroups:
    """Process groups of a rank for collectives on its device, which no other code uses."""

    coded: Any = None  # of the ranks that exchange coded gradients: all, or one of each node
    inside: Any = None  # of the ranks of this node, if gradients are reduced there first


@dataclass
class Collective:
    """Transport by collectives on tensors of the device; `group` consists of the members.

    Its collectives run on the current stream, behind the work that was queued there before.
    """

    group: Any
    control: Any  # process group of all ranks on the CPU, for headers
    members: Sequence[int]  # ranks of `control`
    member_index: int  # index of this rank in `members`
    device: torch.device
    name: str = field(default=COLLECTIVE, init=False)
    on_device: bool = field(default=True, init=False)
    chunk_bytes: int | None = field(init=False)
    _memory: dict[tuple[str, int], Tensor] = field(default_factory=dict, init=False)
    _sent: list[list[MessageHeader]] = field(init=False)  # by receiver, since the last check
    _expected: list[list[tuple[str, MessageHeader]]] = field(init=False)  # by sender

    def __post_init__(self) -> None:
        self.chunk_bytes = chunk_bytes(self.device)
        self._forget()

    def scatter(self, header: MessageHeader, about: str, sizes: Sizes) -> CollectiveTransfer:
        lengths, world = [sum(item) for item in sizes], len(sizes)
        self._log(header, about, lengths, [lengths[self.member_index]] * world)
        result = CollectiveTransfer(self, header, about, messages=world)
        for number in range(max(map(len, sizes))):
            sent = _chunk(sizes, number)
            mine, to = self._buffer("own", number, sent[self.member_index]), self._without_own(sent)
            source = self._buffer("send", number, sum(to))
            outgoing = self._with_own(torch.split(source, to), mine)
            self._add_all_to_all(result, number, outgoing, source, to, [mine.numel()] * world)
        return result

    def gather(self, header: MessageHeader, about: str, sizes: Sizes) -> CollectiveTransfer:
        lengths, world = [sum(item) for item in sizes], len(sizes)
        self._log(header, about, [lengths[self.member_index]] * world, lengths)
        result = CollectiveTransfer(self, header, about, messages=1)
        for number in range(max(map(len, sizes))):
            received = _chunk(sizes, number)
            if world > 2:
                self._add_all_gather(result, number, received)
                continue
            # An all-gather would pad the messages, and gloo's copies all bytes once more.
            mine = self._buffer("own", number, received[self.member_index])
            to = self._without_own([mine.numel()] * world)
            self._add_all_to_all(result, number, [mine], mine, to, received)
        return result

    def _add_all_to_all(
        self,
        result: CollectiveTransfer,
        number: int,
        outgoing: Sequence[Tensor],
        source: Tensor,
        to: Sequence[int],
        received: Sequence[int],
    ) -> None:
        """Add a chunk; `source` has the messages to other members, with `to` bytes each."""
        by = self._without_own(received)
        target = self._buffer("receive", number, sum(by))
        start = partial(distributed.all_to_all_single, target, source, by, to)
        mine = self._buffer("own", number, received[self.member_index])
        incoming = self._with_own(torch.split(target, by), mine)
        result.add(outgoing, incoming, start if sum(to) + sum(by) else None)
        result.nbytes += sum(to)

    def _add_all_gather(
        self, result: CollectiveTransfer, number: int, received: Sequence[int]
    ) -> None:
        # In an all-gather, each rank sends equally many bytes.
        width, world = max(received), len(received)
        source = self._buffer("send", number, width)
        target = self._buffer("receive", number, width * world)
        start = partial(ALL_GATHER, target, source)
        slots = target.view(world, width).unbind()
        chunks = [slot[:size] for slot, size in zip(slots, received, strict=True)]
        result.add([source[: received[self.member_index]]], chunks, start if width else None)
        result.nbytes += width * (world - 1)

    def faults(self) -> Sequence[HeaderFault]:
        """Exchange the headers of the step over the CPU; return those that do not match."""
        sent, expected = self._sent, self._expected
        self._forget()
        peers = [index for index in range(len(self.members)) if index != self.member_index]
        outgoing = {self.members[peer]: _packed(sent[peer]) for peer in peers}
        incoming = {
            self.members[peer]: torch.zeros(HEADER * len(expected[peer]), dtype=torch.uint8)
            for peer in peers
        }
        exchange(self.control, outgoing, incoming, "the end of a step")
        result = []
        for peer in peers:
            rank = self.members[peer]
            received = incoming[rank].view(-1, HEADER)
            for (about, header), message in zip(expected[peer], received, strict=True):
                if (description := header.fault(message)) is not None:
                    result.append(HeaderFault(about, rank, description))
        return result

    def __str__(self) -> str:
        return f"collectives of {distributed.get_backend(self.group)} on {self.device.type}"

    def fail(self, error: RuntimeError, about: str, step: int) -> None:
        """Raise a failed collective on all ranks that respond, or the rank that does not."""
        reason = str(error).strip().partition("\n")[0]
        rank, world = distributed.get_rank(self.control), distributed.get_world_size(self.control)
        text = f"rank {rank} cannot exchange {about} by {self}: {reason}"
        settle(self.control, rank, world, step, StepOutcome([text]))

    def _without_own(self, sizes: Sequence[int]) -> list[int]:
        return [0 if index == self.member_index else size for index, size in enumerate(sizes)]

    def _with_own(self, parts: Sequence[Tensor], mine: Tensor) -> list[Tensor]:
        return [mine if index == self.member_index else part for index, part in enumerate(parts)]

    def _buffer(self, role: str, number: int, nbytes: int) -> Tensor:
        # The work of one exchange is queued before the next one writes to the same buffers.
        memory = self._memory.get((role, number))
        if memory is None or memory.numel() < nbytes:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            self._memory[role, number] = memory
        return memory[:nbytes]

    def _log(
        self, header: MessageHeader, about: str, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        for index, sender in enumerate(self.members):
            self._sent[index].append(replace(header, length=sent[index]))
            expected = replace(header, sender=sender, length=received[index])
            self._expected[index].append((about, expected))

    def _forget(self) -> None:
        self._sent = [[] for _ in self.members]
        self._expected = [[] for _ in self.members]


class CollectiveTransfer:
    """Chunks in flight of one exchange of a `Collective` transport."""

    def __init__(
        self, transport: Collective, header: MessageHeader, about: str, messages: int
    ) -> None:
        self._transport, self._step, self._about = transport, header.step, about
        self.outgoing: list[list[Tensor]] = [[] for _ in range(messages)]
        self.incoming: list[list[Tensor]] = [[] for _ in transport.members]
        self.nbytes = 0
        self._starts: list[Callable[..., Any] | None] = []
        self._works: dict[int, Any] = {}

    def add(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        start: Callable[..., Any] | None,
    ) -> None:
        """Add a chunk of all messages; `start` starts its collective, None for no bytes."""
        for chunks, chunk in zip(self.outgoing, outgoing, strict=True):
            chunks.append(chunk)
        for chunks, chunk in zip(self.incoming, incoming, strict=True):
            chunks.append(chunk)
        self._starts.append(start)

    def send(self, message: int, number: int) -> None:
        start = self._starts[number]
        # The collective of a chunk sends it for all messages.
        if start is not None and message == len(self.outgoing) - 1:
            begin = partial(start, group=self._transport.group, async_op=True)
            self._works[number] = self._tried(begin)

    def wait(self, member: int, number: int) -> str | None:
        if (work := self._works.pop(number, None)) is not None:
            self._tried(work.wait)
        return None

    def end(self) -> None:
        for number in list(self._works):
            self.wait(0, number)

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            self._transport.fail(error, self._about, self._step)
            raise


def _chunk(sizes: Sizes, number: int) -> list[int]:
    return [item[number] if number < len(item) else 0 for item in sizes]


def _packed(headers: Sequence[MessageHeader]) -> Tensor:
    result = torch.zeros(HEADER * len(headers), dtype=torch.uint8)
    for message, header in zip(result.view(-1, HEADER), headers, strict=True):
        header.write(message)
    return result
