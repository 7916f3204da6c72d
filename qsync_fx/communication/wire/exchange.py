"""How ranks send each other bytes: every pair at once, over a process group of our own.

Invariant: every receive is posted before any send, as a send whose receive is not there yet can halve the rate of a link. A rank that does
not answer is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, distributed

from qsync_fx.errors import RankError


class Flight:
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
            found = RankError(
                f"rank {rank} does not answer any more: {reason}",
                where=self._about,
                do="see in its log why, and start all ranks again",
            )
            found.rank = rank
            raise found from error


def exchange(group: Any, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], about: str) -> None:
    """Sends and receives; ranks are those of the group.

    Raises:
        RankError: a rank is gone, or takes longer than the group may.
    """
    flight = Flight(group, about)
    for rank, message in incoming.items():
        flight.expect(rank, message)
    for rank, message in outgoing.items():
        flight.send(rank, message)
    flight.end()
