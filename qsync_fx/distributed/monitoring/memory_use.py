"""Peak memory of a step, measured against the memory limit of the plan.

Measured once per plan after its first steps, and only if the plan has a memory limit, because
recording costs time. On the CPU two steps are recorded
(`qsync_fx.profiler.timing.measured_memory`); on a GPU torch's allocator statistics of one step are
used.

Invariant: sizes are bytes of real tensors; unknown values are None. The check is skipped while
another profiler is active. Each result is logged once.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from qsync_fx.allocator.plan_result import PredictedCost
from qsync_fx.distributed.consensus.agreement import parallel_in
from qsync_fx.errors import PlanError
from qsync_fx.formatting import short
from qsync_fx.profiler.timing.measured_memory import AllocationRecording

_CGROUP = Path("/sys/fs/cgroup")


def parallel_around(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a model is, contains, or is being called by."""
    return parallel_in(model) or DistributedDataParallel._active_ddp_module


def held_bytes(
    model: nn.Module, optimizers: Iterable[Optimizer], parallel: DistributedDataParallel | None
) -> int:
    """Return the bytes of parameters, buffers, optimizer state, and DDP buckets."""
    state = (
        value
        for optimizer in optimizers
        for saved in optimizer.state.values()
        for value in saved.values()
    )
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(value for value in state if isinstance(value, Tensor)),
    ]
    buckets = () if parallel is None else (p for p in parallel.parameters() if p.requires_grad)
    return sum(_storages(tensors).values()) + sum(p.numel() * p.element_size() for p in buckets)


def gradients(
    model: nn.Module, parallel: DistributedDataParallel | None
) -> list[weakref.ref[Tensor]]:
    """Return weak references to the gradients that exist and are not views of a bucket."""
    if parallel is not None and parallel.gradient_as_bucket_view:
        return []
    return [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]


def free_bytes(device: torch.device) -> float | None:
    """Return the free bytes of a device, including torch's reserve; None if unknown."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + reserve)
    return min(_of_system(), default=None)


def _of_system() -> Iterator[float]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (
            1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit.isdecimal():
            yield float(int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            yield float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each storage by address, because tensors may share a storage."""
    result = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        result[storage.data_ptr()] = storage.nbytes()
    return result


_LOG = logging.getLogger("qsync_fx.distributed")
_FIRST = 3
"""Steps that are not measured: they compile code and create the optimizer state."""


class PeakCheck:
    """Peak memory check of one training on one rank.

    Call `called` before each pass and `stepped` after each optimizer step.

    Args:
        model: the trained module.
        who: name of this rank in messages.
        optimizers: returns the optimizers that have stepped.

    Attributes:
        parallel: the DistributedDataParallel, once known.
        over: measured over predicted bytes of the active plan; None before it is measured.
    """

    def __init__(
        self, model: nn.Module, who: str, optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        self._model, self._who, self._optimizers = model, who, optimizers
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._recording: AllocationRecording | None = None
        self.parallel: DistributedDataParallel | None = None
        self.follow(PredictedCost())

    def follow(self, foreseen: PredictedCost) -> None:
        """Restart the check for another plan."""
        self.close()
        self._foreseen, self._steps, self._began, self._second = foreseen, 0, -1, False
        self.over: float | None = None

    def called(self) -> None:
        self.parallel = self.parallel or parallel_around(self._model)
        if (
            self._foreseen.memory is None
            or self._steps < _FIRST
            or self.over is not None
            or not torch.is_grad_enabled()
        ):
            return
        if self._device.type != "cpu":
            if self._began < 0:
                torch.cuda.reset_peak_memory_stats(self._device)
                self._began = self._steps
        elif self._began < 0:
            if not _profiler_enabled():
                self._before = gradients(self._model, self.parallel)
                self._recording, self._began = AllocationRecording(), self._steps
        elif self._recording is not None and self._steps == self._began + 1 and not self._second:
            self._recording.second()
            self._second = True

    def stepped(self) -> None:
        self._steps += 1
        if self._began < 0 or self.over is not None or self._foreseen.memory is None:
            return
        if self._device.type != "cpu":
            self._tell(float(torch.cuda.max_memory_allocated(self._device)), self._foreseen.memory)
        elif self._recording is not None and self._steps == self._began + 2:
            first, second = self._recording.stop()
            self._recording = None
            # Gradients zeroed in place were allocated before the recording, which covers all
            # others.
            saved = (tensor for before in self._before if (tensor := before()) is not None)
            live = held_bytes(self._model, self._optimizers(), self.parallel) + sum(
                tensor.nbytes for tensor in saved
            )
            self._tell(
                live + max(accumulate(second, initial=max(0, sum(first)))), self._foreseen.memory
            )

    def close(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _tell(self, peak: float, memory: float) -> None:
        self.over = peak / (self._foreseen.peak or peak)
        _LOG.info(
            "%s: peak memory of a step %s, limit of its plan %s",
            self._who,
            short(peak, "B"),
            short(memory, "B"),
        )
        if peak > memory:
            foreseen = (
                ""
                if self._foreseen.peak is None
                else f"; predicted peak {short(self._foreseen.peak, 'B')}"
            )
            error = PlanError(
                f"{self._who}: the peak memory of a step is {short(peak, 'B')}, "
                f"{short(peak - memory, 'B')} above the plan's limit of {short(memory, 'B')}",
                where=f"step {self._steps} under this plan{foreseen}",
                do=f"plan for {short(memory * memory / peak, 'B')} of memory on this class, or use "
                "a smaller batch; guard(..., replan=...) replans automatically",
            )
            _LOG.warning("%s", error)
