"""Choice of the transport of compressed gradients, and the process groups that it uses.

Invariant: all ranks choose the same transport before any of them creates a process group.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import distributed

from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.codecs import Codec, first_on_host
from qsync_fx.communication.collective import CollectiveGroups
from qsync_fx.communication.control_group import backend_of
from qsync_fx.communication.transport import AUTO, COLLECTIVE, POINT_TO_POINT
from qsync_fx.distributed.agreement import Meeting
from qsync_fx.errors import OptionError, nearest, shown
from qsync_fx.predictor.replayer.cluster import TRANSPORTS

_GLOO: Final = "gloo"


def checked_transport(transport: object, codecs: Iterable[Codec], device: torch.device) -> str:
    """Return the transport that a rank chooses; raise `OptionError` if the request is invalid.

    "auto" is "collective" if the process group has a backend of the device other than gloo, and
    every codec encodes on the device.
    """
    where = "compress(..., transport=...)"
    if not isinstance(transport, str) or transport not in (AUTO, *TRANSPORTS):
        reported = shown(transport) if isinstance(transport, str) else transport
        do = nearest(str(transport), (AUTO, *TRANSPORTS))
        raise OptionError(f"unknown transport {reported}", where=where, do=do)
    backend = backend_of(device)
    hosted = first_on_host(codecs)
    if transport == AUTO:
        return POINT_TO_POINT if backend in (None, _GLOO) or hosted else COLLECTIVE
    if transport == POINT_TO_POINT:
        return transport
    if hosted:
        text = f"{hosted} is encoded in host memory in messages of any length, which gloo sends"
        do = 'use transport="point_to_point", or a codec such as "qsgd8"'
        raise OptionError(text, where=where, do=do)
    if backend is None or (backend == _GLOO and device.type != "cpu"):
        text = f"the process group has no backend with collectives of bytes on {device.type}"
        do = 'call init_process_group("nccl"), or use transport="point_to_point"'
        raise OptionError(text, where=where, do=do)
    return transport


def agreed_transport(requested: str, chosen: str, limit: float) -> str:
    """Return the transport of all ranks: point to point if "auto" chose differently.

    `limit` are the seconds to wait for another rank. Raise `RankError` for different requests.
    """
    with Meeting(limit, None, collectives=False) as meeting:
        meeting.agree("transports", {"transport": [f"transport={requested!r}"]})
        meeting.put("transport", chosen)
        choices = meeting.get_all("transport", limit)
    return chosen if set(choices) == {chosen} else POINT_TO_POINT


def gradient_groups(
    transport: str, device: torch.device, nodes: NodeGroups | None, limit: float
) -> tuple[Any, CollectiveGroups | None]:
    """Create the gloo group of all ranks, and the groups of the collective transport.

    Call it on all ranks. `limit` is the timeout of the groups in seconds.
    """
    timeout = datetime.timedelta(seconds=limit)
    control = distributed.new_group(backend=_GLOO, timeout=timeout)
    if transport != COLLECTIVE:
        return control, None
    settings: dict[str, Any] = {"backend": backend_of(device), "timeout": timeout}
    if nodes is None:
        return control, CollectiveGroups(distributed.new_group(**settings))
    across = [list(nodes.across(rank)) for rank in nodes.ranks[0]]
    inside = [list(ranks) for ranks in nodes.ranks]
    new_subgroups: Any = distributed.new_subgroups_by_enumeration
    coded, _ = new_subgroups(across, **settings)
    reduced, _ = new_subgroups(inside, **settings)
    return control, CollectiveGroups(coded, reduced)
