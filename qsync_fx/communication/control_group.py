"""Process group for control data on the CPU; all ranks call each function together.

It is the default process group if that supports the CPU; otherwise, for example after
`init_process_group("nccl")`, an additional gloo group.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from qsync_fx.torch_internals import _get_default_group, _world

CPU: Final = torch.device("cpu")
_DESCRIPTION: Final = "qsync: control messages between ranks"


def control() -> ProcessGroup | None:
    """Return the CPU group of all ranks, created on first use; None for the default group."""
    default: Any = _get_default_group()
    if CPU.type in {device.type for device in default._device_types}:
        return None
    # torch drops groups when they are destroyed; a cache of our own would outlive them.
    groups: list[Any] = list(_world.pg_map)
    for group in groups:
        if group.group_desc == _DESCRIPTION:
            return group  # type: ignore[no-any-return]
    limit = limit_of_group()
    made: ProcessGroup = distributed.new_group(
        backend="gloo", timeout=limit and datetime.timedelta(seconds=limit), group_desc=_DESCRIPTION
    )
    return made


def carrying(device: torch.device) -> ProcessGroup | None:
    """Return the group of all ranks for gradients on a device; None for the default group."""
    return control() if device.type == "cpu" else None


def backend_of(device: torch.device, group: ProcessGroup | None = None) -> str | None:
    """Return the backend of a group for a device, such as "nccl"; None if it has none.

    Without `group`, it is the default process group.
    """
    rows = distributed.get_backend_config(group).split(",")
    return dict(row.split(":") for row in rows).get(device.type)


def meet() -> None:
    """Wait for all ranks (barrier)."""
    distributed.barrier(group=control())


def slowest(seconds: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(longest, distributed.ReduceOp.MAX, group=control())
    return longest.tolist()


def mean(value: float) -> float:
    """Return the mean over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(total, group=control())
    return float(total) / distributed.get_world_size()


def limit_of(backend: Any) -> datetime.timedelta | None:
    """Return the timeout of a torch.distributed backend; None if it has none."""
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, datetime.timedelta) else None


def limit_of_group() -> float | None:
    """Return the timeout of the default process group in seconds; None if it has none."""
    default: Any = _get_default_group()
    limits = [limit_of(default._get_backend(device)) for device in default._device_types]
    return min((limit.total_seconds() for limit in limits if limit is not None), default=None)
