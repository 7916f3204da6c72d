"""The time that collectives of this process's groups may take.

A group's limit is for a rank that is lost, and a rank that compiles is not: while it does, others wait for it in a collective. So under a
guard collectives may take as long as compiling may, and the group's own limit is that of a rank that says nothing, which its watcher keeps.

Invariant: what was there before is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d

from qsync_fx.communication.control import limit_of

_PATIENCE: Final = 1800.0


def limit_of_group() -> float | None:
    """Returns the seconds that collectives of the default group may take; None where it does not say."""
    found = [seconds for backend in _backends() if (seconds := _limit(backend)) is not None]
    return min(found, default=None)


@contextlib.contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """Lets collectives take so long, where they may not take longer anyway."""
    changed = [(b, limit) for b in _backends(every=True) if (limit := _limit(b)) is not None and limit < seconds]
    for backend, _ in changed:
        backend._set_default_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        for backend, limit in changed:
            backend._set_default_timeout(timedelta(seconds=limit))


def _backends(every: bool = False) -> list[Any]:
    groups: list[Any] = list(distributed_c10d._world.pg_map) if every else [distributed_c10d._get_default_group()]
    found = {}
    for group in groups:
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            if hasattr(backend, "_set_default_timeout"):
                found[id(backend)] = backend
    return list(found.values())


def _limit(backend: Any) -> float | None:
    limit = limit_of(backend)
    return None if limit is None else limit.total_seconds()


def patience() -> float:
    """Returns the seconds for which ranks wait for one another: the limit of the default group, or half an hour."""
    return limit_of_group() or _PATIENCE
