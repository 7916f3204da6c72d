"""How ranks send each other bytes: every pair at once, over a process group of our own.

Invariant: every receive is posted before any send, as a send whose receive is not there yet can halve the rate of a link. A rank that does
not answer is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, distributed

from qsync_fx.errors import RankError


def exchange(group: Any, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], about: str) -> None:
    """Sends and receives; ranks are those of the group.

    Raises:
        RankError: a rank is gone, or takes longer than the group may.
    """
    waiting: list[tuple[int, Any]] = []
    try:
        for rank, message in incoming.items():
            waiting.append((rank, distributed.irecv(message, group=group, group_src=rank)))
        for rank, message in outgoing.items():
            waiting.append((rank, distributed.isend(message, group=group, group_dst=rank)))
        for rank, work in waiting:  # noqa: B007  an error names it
            work.wait()
    except RuntimeError as error:
        found = RankError(
            f"rank {rank} does not answer any more: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason is given'}",
            where=about,
            do="see in its log why, and start all ranks again",
        )
        found.rank = rank
        raise found from error
