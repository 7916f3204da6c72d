"""Which ranks share a node: as torchrun has started them, by the names of their hosts, or as the user says.

Invariant: all ranks find the same nodes, all of as many ranks, or all raise.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import distributed

from qsync_fx import environment
from qsync_fx.communication.control_group import CPU, carrying
from qsync_fx.communication.hierarchical import NodeGroups
from qsync_fx.distributed.consensus.rendezvous import Meeting
from qsync_fx.errors import OptionError
from qsync_fx.predictor.replayer import cluster
from qsync_fx.profiler.links.collective_times import all_reduces

_REMEDIES: Final = {"hierarchy": "give compress the same hierarchical on all ranks"}


def nodes_of_ranks(hierarchical: bool | int, limit: float) -> NodeGroups | None:
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
            return grouped(_names(meeting, limit))
        return grouped(in_a_row(hierarchical, meeting.world))


@dataclass(frozen=True)
class NodeLinks:
    """What a plan for the ranks that are up is made for, beside the devices.

    Attributes:
        nodes: as a cluster has them, with what was measured inside and between them; of one rank each where they are not told apart.
        in_a_row: whether it is the user who says which ranks share one.
        uneven: whether ranks share nodes that have different numbers of them, so that nodes are not told apart.
    """

    nodes: cluster.NodeGroup = field(default_factory=cluster.NodeGroup)
    in_a_row: bool = False
    uneven: bool = False


FLAT: Final = NodeLinks()
"""All ranks alike."""


def nodes_to_plan_for(
    meeting: Meeting, hierarchical: bool | int | None, limit: float
) -> tuple[NodeGroups | None, bool]:
    """Returns the nodes that a plan is made for, None where ranks are not to be told apart, and whether that is so as nodes are uneven.

    Args:
        hierarchical: as `nodes_of_ranks` takes it; None for nodes where there are several, all of as many ranks, several of them. Rank 0's
            counts.
        limit: seconds that another rank may take to come.

    Raises:
        OptionError: nodes have different numbers of ranks, on rank 0.
        RankError: the same, on the others.
    """
    names = _names(meeting, limit)
    if meeting.rank == 0:
        uneven = hierarchical is None and len({names.count(name) for name in names}) > 1
        if hierarchical is False or uneven or (hierarchical is None and len(set(names)) == 1):
            nodes = None
        else:
            nodes = grouped(
                names if hierarchical in (None, True) else in_a_row(hierarchical, meeting.world)
            )
        meeting.put("nodes", json.dumps([None if nodes is None else nodes.ranks, uneven]))
    ranks, uneven = json.loads(meeting.get("nodes", 0, limit))
    return None if ranks is None else NodeGroups(tuple(map(tuple, ranks))), uneven


def links_between_nodes(
    meeting: Meeting, hierarchical: bool | int | None, limit: float, device: torch.device = CPU
) -> NodeLinks:
    """Returns what a plan for the ranks that are up is made for, once these have measured, all at once, what all-reduces take inside nodes
    and between them, of gradients on a device; other arguments, and errors, are those of `nodes_to_plan_for`."""
    nodes, uneven = nodes_to_plan_for(meeting, hierarchical, limit)
    if nodes is None:
        return NodeLinks(uneven=uneven)
    return NodeLinks(measured(nodes, device), in_a_row=not isinstance(hierarchical, bool | None))


def measured(nodes: NodeGroups, device: torch.device = CPU) -> cluster.NodeGroup:
    """Returns what all-reduces take inside nodes and between them, the same on all ranks, which call it together."""
    size, count = nodes.size, len(nodes.ranks)
    inside = all_reduces(nodes.ranks, device)
    across = (
        all_reduces([nodes.across(rank) for rank in nodes.ranks[0]], device) if count > 1 else []
    )
    return cluster.NodeGroup(
        size,
        ring=distributed.get_backend(carrying(device)) == "gloo",
        inside=[(float(nbytes), seconds) for nbytes, seconds in inside],
        across=[(float(size * nbytes), seconds) for nbytes, seconds in across],
        count=count if across else None,
    )


def in_a_row(size: int, world: int) -> list[str]:
    """Returns the node of each rank, where so many in a row share one."""
    if size < 1 or world % size:
        message = f"{world} ranks do not make nodes of {size}"
        raise OptionError(
            message, where="hierarchical", do="give a number that divides the ranks, or True"
        )
    return [str(rank // size) for rank in range(world)]


def grouped(names: Sequence[str]) -> NodeGroups | None:
    """Returns nodes by the name of each rank's; None where no two ranks share one."""
    result: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        result.setdefault(name, []).append(rank)
    sizes = {name: len(ranks) for name, ranks in result.items()}
    if len(set(sizes.values())) > 1:
        most, fewest = (
            max(sizes, key=lambda name: sizes[name]),
            min(sizes, key=lambda name: sizes[name]),
        )
        raise OptionError(
            f"the node {most} has {sizes[most]} ranks, and {fewest} has {sizes[fewest]}",
            where="hierarchical",
            do="start as many ranks on each node, or give hierarchical=False",
        )
    return (
        None
        if len(result) == len(names)
        else NodeGroups(tuple(tuple(ranks) for ranks in result.values()))
    )


def _names(meeting: Meeting, limit: float) -> list[str]:
    """Returns what the node of each rank is called."""
    meeting.put("node", _own())
    return [meeting.get("node", rank, limit) for rank in range(meeting.world)]


def _own() -> str:
    """Returns what this rank's node is called: by torchrun's number, where it has started the rank, else by the host."""
    if (node := environment.text("GROUP_RANK")) and environment.text("LOCAL_WORLD_SIZE"):
        return json.dumps(["torchrun's", node])
    return socket.gethostname()
