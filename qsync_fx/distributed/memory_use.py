"""Peak memory of a step, measured against the memory limit of the plan.

Measured once per plan after its first steps, and only if the plan has a memory limit. On the CPU
two steps are recorded, unless another profiler is active; on a GPU torch's statistics are used.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from qsync_fx.allocator.plan_result import PredictedCost
from qsync_fx.backend.cuda.kernel_build.compiler import available_memory
from qsync_fx.distributed.agreement import parallel_in
from qsync_fx.errors import PlanError
from qsync_fx.formatting import short
from qsync_fx.profiler.timing.measured_memory import AllocationRecording
from qsync_fx.torch_internals import _get_active_ddp_module, _profiler_enabled


def held_bytes(
    model: nn.Module, optimizers: Iterable[Optimizer], parallel: DistributedDataParallel | None
) -> int:
    """Return the bytes of parameters, buffers, optimizer state, and DDP buckets."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    # Tensors may share a storage.
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    total = sum(storages.values())
    if parallel is not None:
        total += sum(p.nbytes for p in parallel.parameters() if p.requires_grad)
    return total


def free_bytes(device: torch.device) -> float | None:
    """Return the free bytes of a device, including torch's reserve; None if unknown."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + reserve)
    if Path("/proc/meminfo").exists():
        return float(available_memory())
    return None


_LOG = logging.getLogger("qsync_fx.distributed")
_FIRST = 3  # steps that are not measured: they compile code and create the optimizer state


class PeakCheck:
    """Peak memory check of one training on one rank; `who` is its name in messages.

    Call `called` before each pass and `stepped` after each optimizer step. `over` is the ratio of
    measured to predicted bytes of the active plan; None before it is measured.
    """

    def __init__(
        self, model: nn.Module, who: str, optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        self._model, self._who, self._optimizers = model, who, optimizers
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._recording: AllocationRecording | None = None
        self.parallel: DistributedDataParallel | None = None
        self.follow(PredictedCost())

    def follow(self, predicted: PredictedCost) -> None:
        """Restart the check for another plan."""
        self.close()
        self._predicted, self._steps, self._began, self._second = predicted, 0, -1, False
        self.over: float | None = None

    @property
    def _is_open(self) -> bool:
        return self._predicted.memory is not None and self.over is None

    def called(self) -> None:
        called_by = _get_active_ddp_module()
        self.parallel = self.parallel or parallel_in(self._model) or called_by
        if not self._is_open or self._steps < _FIRST or not torch.is_grad_enabled():
            return
        if self._device.type != "cpu":
            if self._began < 0:
                torch.cuda.reset_peak_memory_stats(self._device)
                self._began = self._steps
        elif self._began < 0 and not _profiler_enabled():
            self._before = []
            if self.parallel is None or not self.parallel.gradient_as_bucket_view:
                gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
                self._before = [weakref.ref(gradient) for gradient in gradients]
            self._recording, self._began = AllocationRecording(), self._steps
        elif self._recording is not None and self._steps == self._began + 1 and not self._second:
            self._recording.second()
            self._second = True

    def stepped(self) -> None:
        self._steps += 1
        if not self._is_open or self._began < 0:
            return
        if self._device.type != "cpu":
            self._report(float(torch.cuda.max_memory_allocated(self._device)))
        elif self._recording is not None and self._steps == self._began + 2:
            first, second = self._recording.stop()
            self._recording = None
            live = held_bytes(self._model, self._optimizers(), self.parallel)
            # Gradients zeroed in place were allocated before the recording, unlike all others.
            live += sum(tensor.nbytes for g in self._before if (tensor := g()) is not None)
            self._report(live + max(accumulate(second, initial=max(0, sum(first)))))

    def close(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _report(self, peak: float) -> None:
        memory, predicted = self._predicted.memory or 0.0, self._predicted.peak
        self.over = peak / (predicted or peak)
        used, limit = short(peak, "B"), short(memory, "B")
        _LOG.info("%s: peak memory of a step %s, limit of its plan %s", self._who, used, limit)
        if peak > memory:
            where = f"step {self._steps} under this plan"
            if predicted is not None:
                where += f"; predicted peak {short(predicted, 'B')}"
            over, possible = short(peak - memory, "B"), short(memory * memory / peak, "B")
            text = f"{self._who}: the peak memory of a step is {used}, {over} above the plan's "
            do = f"plan for {possible} of memory on this class, or use a smaller batch; "
            do += "guard(..., replan=...) replans automatically"
            _LOG.warning("%s", PlanError(f"{text}limit of {limit}", where=where, do=do))
