"""Durations of exchanges of compressed gradients, by transport, message size and group of ranks.

One phase is measured: each rank sends bytes to each other rank of its group, as in a
reduce-scatter or an all-gather of compressed gradients. Encoding is not included. All groups of a
kind exchange at once, as they do in a step, so that ranks of a node share its link.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from qsync_fx.communication.collective import ALL_GATHER, chunk_bytes
from qsync_fx.communication.control_group import CPU, carrying, control
from qsync_fx.communication.point_to_point import exchange
from qsync_fx.predictor.replayer.cluster import TRANSPORTS, Exchange, RankGroup, Transport
from qsync_fx.profiler.links.collective_times import (
    MANY,
    REPEATS,
    SHORT,
    last_rank_seconds,
    rising,
)

_SIZES: Final = tuple(2**power for power in range(10, 25, 2))
"""Bytes that a rank sends: 1 KiB to 16 MiB."""

Phase = Callable[[], object]
"""One phase of an exchange, or several."""


def _messages(nbytes: int, group: Any) -> tuple[Phase, int]:
    """Return a phase of messages through host memory that sends `nbytes` per rank."""
    group = group or distributed.group.WORLD
    others = set(range(distributed.get_world_size(group))) - {distributed.get_rank(group)}
    peers = sorted(others)
    message = torch.zeros(max(nbytes // len(peers), 1), dtype=torch.uint8)
    incoming = {peer: torch.empty_like(message) for peer in peers}
    about = "a measurement of links"
    return partial(exchange, group, dict.fromkeys(peers, message), incoming, about), 1


def _collectives(nbytes: int, group: Any, device: torch.device) -> tuple[Phase, int]:
    """Return the collectives of a reduction that send `nbytes` per rank each, and their number.

    They are cut into the chunks of the transport, which are all under way at once.
    """
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    part = max(nbytes // (ranks - 1), 1)
    most = chunk_bytes(device) or part
    to_all, to_gather = [], []
    for begin in range(0, part, most):
        size = min(most, part - begin)
        peers = [0 if peer == rank else size for peer in range(ranks)]
        sent = torch.zeros(size * (ranks - 1), dtype=torch.uint8, device=device)
        target = torch.empty_like(sent)
        to_all.append(partial(distributed.all_to_all_single, target, sent, peers, peers))
        if ranks > 2:
            gathered = torch.empty(size * ranks, dtype=torch.uint8, device=device)
            to_gather.append(partial(ALL_GATHER, gathered, sent[:size]))
    phases = [to_all, to_gather] if to_gather else [to_all]

    def run() -> None:
        for starts in phases:
            works = [start(group=group, async_op=True) for start in starts]
            for work in works:
                work.wait()

    return run, len(phases)


def exchange_seconds(
    transport: Transport,
    nbytes: int,
    repeats: int = REPEATS,
    device: torch.device = CPU,
    group: ProcessGroup | None = None,
) -> float:
    """Return the median seconds of a phase in which each rank of a group sends `nbytes` in total.

    All ranks call this together; the result is equal on all of them.

    Args:
        group: ranks that exchange; by default all of them.
    """
    if transport == "point_to_point":
        group = group or control()
        call, phases = _messages(nbytes, group)
        return last_rank_seconds(call, repeats, CPU, group) / phases
    group = group or carrying(device)
    call, phases = _collectives(nbytes, group, device)
    return last_rank_seconds(call, repeats, device, group) / phases


def exchanges(
    device: torch.device = CPU,
    groups: Mapping[RankGroup, Sequence[Sequence[int]]] = MappingProxyType({}),
    transports: Sequence[Transport] = TRANSPORTS,
    largest: int = _SIZES[-1],
    many: int = MANY,
) -> list[Exchange]:
    """Measure exchanges with each transport, on all ranks at once.

    A transport that torch.distributed's backend does not support is left out, with a warning.

    Args:
        device: device of gradients.
        groups: groups of ranks of each kind, with each rank in one group; by default one group of
            all ranks.
        transports: transports to measure.
        largest: limit of the bytes that a rank sends.
        many: number of repetitions of short exchanges.
    """
    by_kind = groups or {"all": [range(distributed.get_world_size())]}
    result: list[Exchange] = []
    for transport in transports:
        try:
            for kind, ranks in by_kind.items():
                seconds = _table(transport, device, ranks, largest, many)
                result.append(Exchange(transport, kind, len(ranks[0]), seconds))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            text = f"the transport {transport} of compressed gradients was not measured: {reason}"
            warnings.warn(text, stacklevel=2)
    return result


def _table(
    transport: Transport,
    device: torch.device,
    groups: Sequence[Sequence[int]],
    largest: int,
    many: int,
) -> list[tuple[float, float]]:
    """Return the pairs of bytes, up to `largest`, and seconds of all groups at once."""
    group = None
    if len(groups) > 1:
        full = carrying(device) if transport == "collective" else control()
        made: Any = distributed.new_subgroups_by_enumeration
        ranks, backend = [list(item) for item in groups], distributed.get_backend(full)
        group, _ = made(ranks, backend=backend)
    try:
        table = []
        for size in (size for size in _SIZES if size <= largest):
            seconds = exchange_seconds(transport, size, REPEATS, device, group)
            if seconds < SHORT and many > REPEATS:
                seconds = exchange_seconds(transport, size, many, device, group)
            table.append((size, seconds))
        return [(float(size), seconds) for size, seconds in rising(table)]
    finally:
        if group is not None:
            distributed.destroy_process_group(group)
