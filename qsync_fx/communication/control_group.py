"""What ranks tell one another beside gradients: seconds, hashes and other numbers, which lie on the CPU.

They go over the default process group where it takes tensors on the CPU, and else, as after `init_process_group("nccl")`, over a group of
gloo beside it. Gradients, and what is sent to see how long they travel, go over the default group, on their device.

Invariant: all ranks call each of these together, as they call a collective.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d

CPU: Final = torch.device("cpu")
_CALLED: Final = "qsync: what ranks tell one another"


def control() -> ProcessGroup | None:
    """Returns the group of all ranks that takes tensors on the CPU, made where it is asked for first; None for the default one."""
    default: Any = distributed_c10d._get_default_group()
    if CPU.type in {device.type for device in default._device_types}:
        return None
    # Torch forgets its groups as they are destroyed, and what stood here would outlive them.
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        if group.group_desc == _CALLED:
            return group  # type: ignore[no-any-return]
    limits = (limit_of(default._get_backend(device)) for device in default._device_types)
    timeout = min((limit for limit in limits if limit is not None), default=None)
    made: ProcessGroup = distributed.new_group(backend="gloo", timeout=timeout, group_desc=_CALLED)
    return made


def carrying(device: torch.device) -> ProcessGroup | None:
    """Returns the group of all ranks that gradients on a device go over; None for the default one.

    Those on the CPU go over gloo where the default group refuses them, as DistributedDataParallel is then told to.
    """
    return None if device.type != "cpu" else control()


def meet() -> None:
    """Returns once all ranks have come."""
    distributed.barrier(group=control())


def slowest(seconds: Sequence[float]) -> list[float]:
    """Returns the largest that any rank gives in each place, the same on all of them."""
    used = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(used, distributed.ReduceOp.MAX, group=control())
    result: list[float] = used.tolist()
    return result


def mean(value: float) -> float:
    """Returns the mean over all ranks, the same on all of them."""
    total = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(total, group=control())
    return float(total) / distributed.get_world_size()


def limit_of(backend: Any) -> datetime.timedelta | None:
    """Returns how long collectives of a backend of torch.distributed may take; None where it does not say."""
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, datetime.timedelta) else None
