"""Rank process of the memory tests of DUO, started by tests/communication and tests/gpu."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.duo import duo_hook
from qsync_fx.communication.duo.offload import Offload
from qsync_fx.communication.duo.sign_codecs import DUOS
from qsync_fx.distributed import compress
from tests.support.processes import ranks

STEPS = 4


def training(name: str | None, job: dict[str, Any], moment: Any = None) -> Iterator[Any]:
    """Train with AdamW and yield the handle after each step; call `moment` around steps."""
    torch.manual_seed(0)
    width = job["width"]
    layers = [nn.Linear(width, width) for _ in range(6)]
    # Python sees the storage of DDP's buckets only if gradients are views of them.
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(job["device"]), bucket_cap_mb=1, gradient_as_bucket_view=True
    )
    optimizer, handle = torch.optim.AdamW(model.parameters(), lr=0.01), None
    if moment is not None:
        optimizer.register_step_pre_hook(moment)
    if name is not None:
        duo = replace(DUOS[name], offload=job["offload"])
        handle = compress(model, duo, optimizer=optimizer, sharded=job.get("sharded", False))
    if moment is not None:
        optimizer.register_step_post_hook(moment)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(4, width, device=job["device"])
        model(inputs).square().mean().backward()
        optimizer.step()
        yield handle
    if handle is not None:
        handle.flush()


def live_tensors(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the peak bytes of live tensors outside of host memory, with DUO and without.

    On a CPU, host memory consists of the allocations of `Offload` and of message buffers.
    """
    host: list[Tensor] = []

    class Recorded(Offload):
        def empty_like(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            result = super().empty_like(values, dtype)
            if self.active:
                host.append(result)
            return result

    def recorded(nbytes: int, device: torch.device) -> Tensor:
        host.append(torch.zeros(nbytes, dtype=torch.uint8))
        return host[-1]

    def peak(name: str | None) -> tuple[int, str]:
        gc.collect()
        before = {key for key, _ in storages()}
        peaks = []

        def moment(*_: object) -> None:
            excluded = {tensor.untyped_storage().data_ptr() for tensor in host} | before
            peaks.append(sum(n for key, n in storages() if key not in excluded))

        for handle in training(name, job, moment):
            moment()
            printed = repr(handle)
        assert len(peaks) == 3 * STEPS + (0 if name is None else 2 * STEPS), len(peaks)
        return max(peaks), printed

    duo_hook.Offload, buffers.host = Recorded, recorded  # type: ignore[misc]
    plain, _ = peak(None)
    duo, printed = peak(job["codec"])
    return {"plain": plain, "duo": duo, "host": sum(t.nbytes for t in host), "printed": printed}


def storages() -> set[tuple[int, int]]:
    """Return address and bytes of each storage of the tensors that Python's collector tracks."""
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    tensors += [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    memory = [tensor.untyped_storage() for tensor in tensors]
    return {(item.data_ptr(), item.nbytes()) for item in memory}


def allocator_peak(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the CUDA allocator's peak bytes after the second step, with DUO and without."""
    peaks = {}
    for name in (None, job["codec"]):
        for step, _ in enumerate(training(name, job)):
            torch.cuda.synchronize()
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
        peaks[str(name)] = torch.cuda.max_memory_allocated()
        gc.collect()
        torch.cuda.empty_cache()
        distributed.barrier()
    return peaks


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
