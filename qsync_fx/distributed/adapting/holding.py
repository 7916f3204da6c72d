"""What a rank holds between two steps, and what its device has free.

Invariant: bytes of real tensors; nothing is guessed. What cannot be known is None.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from qsync_fx.distributed.agreeing.statements import parallel_in

_CGROUP = Path("/sys/fs/cgroup")


def parallel_around(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel that a model is, holds, or is called by at this moment, as where a trainer has wrapped it."""
    return parallel_in(model) or DistributedDataParallel._active_ddp_module


def held_bytes(model: nn.Module, optimizers: Iterable[Optimizer], parallel: DistributedDataParallel | None) -> int:
    """Returns what is held throughout: parameters, buffers, the optimizers' state, and the buckets of DistributedDataParallel."""
    state = (value for optimizer in optimizers for kept in optimizer.state.values() for value in kept.values())
    tensors = [*model.parameters(), *model.buffers(), *(value for value in state if isinstance(value, Tensor))]
    buckets = () if parallel is None else (p for p in parallel.parameters() if p.requires_grad)
    return sum(_storages(tensors).values()) + sum(p.numel() * p.element_size() for p in buckets)


def gradients(model: nn.Module, parallel: DistributedDataParallel | None) -> list[weakref.ref[Tensor]]:
    """Returns the gradients that are there and are no part of a bucket, as far as they stay there."""
    if parallel is not None and parallel.gradient_as_bucket_view:
        return []
    return [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]


def free_bytes(device: torch.device) -> float | None:
    """Returns what a device has free, with what torch has of it in reserve."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + reserve)
    return min(_of_system(), default=None)


def _of_system() -> Iterator[float]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit.isdecimal():
            yield float(int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            yield float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Returns the bytes of each storage by its address: tensors may share one."""
    found = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found
