"""Node topology: which ranks share a node, and the links inside and between nodes.

Nodes come from torchrun, from host names, or from the user. Invariant: all ranks obtain the same
nodes, each with the same number of ranks, or all raise.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from qsync_fx import environment
from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.control_group import CPU
from qsync_fx.distributed.agreement import Meeting
from qsync_fx.errors import OptionError
from qsync_fx.predictor.replayer.cluster import Exchange, RankGroup
from qsync_fx.profiler.links.exchange_times import exchanges


def nodes_of_ranks(hierarchical: bool | int, limit: float) -> NodeGroups | None:
    """Return the nodes; None if ranks are not grouped, or each has a node of its own.

    `limit` are the seconds to wait for another rank. Raise `OptionError` for nodes of unequal size.
    """
    with Meeting(limit, None, collectives=False) as meeting:
        meeting.agree("hierarchies", {"hierarchy": [f"hierarchical={hierarchical!r}"]})
        if hierarchical is False:
            return None
        if hierarchical is True:
            return grouped(_node_names(meeting, limit))
        return grouped(in_a_row(hierarchical, meeting.world))


@dataclass(frozen=True)
class NodeLinks:
    """Node topology that a plan is solved for.

    Attributes:
        size: ranks per node; 1 for no nodes.
        exchanges: measured exchanges of compressed gradients inside and between nodes.
        in_a_row: whether the user gave the number of consecutive ranks per node.
        uneven: whether nodes differ in the number of ranks.
    """

    size: int = 1
    exchanges: tuple[Exchange, ...] = ()
    in_a_row: bool = False
    uneven: bool = False


FLAT: Final = NodeLinks()  # topology without nodes


def nodes_to_plan_for(
    meeting: Meeting, hierarchical: bool | int | None, limit: float
) -> tuple[NodeGroups | None, bool]:
    """Return the nodes that a plan is solved for, if any, and whether they have different sizes.

    Rank 0's `hierarchical` is used; None groups ranks if there are several nodes of equal size.
    """
    names = _node_names(meeting, limit)
    meeting.put("hierarchical", json.dumps(hierarchical))
    hierarchical = json.loads(meeting.get("hierarchical", 0, limit))
    uneven = hierarchical is None and len({names.count(name) for name in names}) > 1
    one_node = hierarchical is None and len(set(names)) == 1
    if hierarchical is False or uneven or one_node:
        return None, uneven
    if not isinstance(hierarchical, bool | None):
        names = in_a_row(hierarchical, meeting.world)
    return grouped(names), uneven


def links_between_nodes(
    meeting: Meeting, hierarchical: bool | int | None, limit: float, device: torch.device = CPU
) -> NodeLinks:
    """Return the topology of the running ranks, with exchanges measured by all of them."""
    nodes, uneven = nodes_to_plan_for(meeting, hierarchical, limit)
    if nodes is None:
        return NodeLinks(uneven=uneven)
    in_a_row = not isinstance(hierarchical, bool | None)
    return NodeLinks(nodes.size, tuple(measured(nodes, device)), in_a_row)


def measured(nodes: NodeGroups, device: torch.device = CPU, **settings: Any) -> list[Exchange]:
    """Measure exchanges inside and between nodes; call it on all ranks.

    `settings` are further arguments of `exchanges`.
    """
    groups: dict[RankGroup, Sequence[Sequence[int]]] = {"inside": nodes.ranks}
    if len(nodes.ranks) > 1:
        groups["between"] = [nodes.across(rank) for rank in nodes.ranks[0]]
    return exchanges(device, groups, **settings)


def in_a_row(size: int, world: int) -> list[str]:
    """Return the node name of each rank, for nodes of `size` consecutive ranks."""
    if size < 1 or world % size:
        text = f"{world} ranks cannot be divided into nodes of {size}"
        do = "use a divisor of the number of ranks, or True"
        raise OptionError(text, where="hierarchical", do=do)
    return [str(rank // size) for rank in range(world)]


def grouped(names: Sequence[str]) -> NodeGroups | None:
    """Return the nodes from the node name of each rank; None if no two ranks share one."""
    result: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        result.setdefault(name, []).append(rank)
    sizes = {name: len(ranks) for name, ranks in result.items()}
    most, fewest = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
    if sizes[most] != sizes[fewest]:
        text = f"the node {most} has {sizes[most]} ranks, but {fewest} has {sizes[fewest]}"
        do = "start the same number of ranks on each node, or set hierarchical=False"
        raise OptionError(text, where="hierarchical", do=do)
    if len(result) == len(names):
        return None
    return NodeGroups(tuple(map(tuple, result.values())))


def _node_names(meeting: Meeting, limit: float) -> list[str]:
    name = socket.gethostname()
    if (node := environment.text("GROUP_RANK")) and environment.text("LOCAL_WORLD_SIZE"):
        name = json.dumps(["torchrun's", node])
    meeting.put("node", name)
    return meeting.get_all("node", limit)
