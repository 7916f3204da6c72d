"""Which ranks share a node: as torchrun has started them, by the names of their hosts, or as the user says.

Invariant: all ranks find the same nodes, all of as many ranks, or all raise.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Sequence

from qsync_fx.communication.hierarchy import Nodes
from qsync_fx.distributed.agreeing.meeting import Meeting
from qsync_fx.errors import OptionError

_WHERE = "compress(..., hierarchical=...)"
_REMEDIES = {"hierarchy": "give compress the same hierarchical on all ranks"}


def nodes_of_ranks(hierarchical: bool | int, limit: float) -> Nodes | None:
    """Returns the nodes; None where ranks are not to be told apart, or each has a node of its own.

    Args:
        hierarchical: whether they are; a number for nodes of so many ranks in a row.
        limit: seconds that another rank may take to come.

    Raises:
        OptionError: nodes have different numbers of ranks.
        RankError: ranks do not say the same.
    """
    with Meeting(limit, None, collectives=False) as meeting:
        meeting.agree("hierarchies", {"hierarchy": [f"hierarchical={hierarchical!r}"]}, _REMEDIES)
        if hierarchical is False:
            return None
        if hierarchical is True:
            meeting.put("node", _own())
            return grouped([meeting.get("node", rank, limit) for rank in range(meeting.world)])
        return grouped(in_a_row(hierarchical, meeting.world))


def in_a_row(size: int, world: int) -> list[str]:
    """Returns the node of each rank, where so many in a row share one."""
    if size < 1 or world % size:
        what = f"{world} ranks do not make nodes of {size}"
        raise OptionError(what, where=_WHERE, do="give a number that divides the ranks, or True")
    return [str(rank // size) for rank in range(world)]


def grouped(names: Sequence[str]) -> Nodes | None:
    """Returns nodes by the name of each rank's; None where no two ranks share one."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    sizes = {name: len(ranks) for name, ranks in found.items()}
    if len(set(sizes.values())) > 1:
        most, fewest = max(sizes, key=lambda name: sizes[name]), min(sizes, key=lambda name: sizes[name])
        raise OptionError(
            f"the node {most} has {sizes[most]} ranks, and {fewest} has {sizes[fewest]}",
            where=_WHERE,
            do="start as many ranks on each node, or leave hierarchical out",
        )
    if len(found) == 1:
        warnings.warn(
            "all ranks share one node, inside of which gradients go in FP32: nothing is compressed", stacklevel=4
        )
    return None if len(found) == len(names) else Nodes(tuple(tuple(ranks) for ranks in found.values()))


def _own() -> str:
    """Returns what this rank's node is called: by torchrun's number, where it has started the rank, else by the host."""
    if "GROUP_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return json.dumps(["torchrun's", os.environ["GROUP_RANK"]])
    return socket.gethostname()
