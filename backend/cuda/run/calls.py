"""What every call of a kernel needs: the library or the reason why there is none, the device and its stream, memory to work in.

Invariant: nothing waits for the device, and while a CUDA graph is captured nothing is compiled: a kernel that is not loaded by then is
torch's to compute.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from qsync_fx.backend.cuda.libraries import kernels
from qsync_fx.backend.cuda.libraries.library import Arguments, Library
from qsync_fx.backend.cuda.run import reasons
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.errors import KernelError, QSyncError


def library(unit: Unit, device: torch.device, shown: str) -> Library | None:
    """Returns the library of a unit; None, with a reason kept for what is `shown`, where torch is to compute."""
    try:
        found = kernels.library(unit, wait=not capturing(device))
    except QSyncError as error:
        reasons.note(shown, error.what)
        return None
    if found is None:
        reasons.note(shown, "its kernel was not loaded before a CUDA graph was captured")
    return found


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def address(t: Tensor | None) -> int | None:
    """Returns where a tensor's values start; None, which kernels see as a null pointer, where there is none."""
    return None if t is None else t.data_ptr()


def run(library: Library, arguments: Arguments, device: torch.device) -> None:
    """Asks a kernel whether it takes arguments, gives it memory and queues it on the current stream; raises `KernelError`."""
    why = library.can_implement(arguments)
    if why is not None:
        raise KernelError(f"its kernel does not take these operands: {why}", where=library.unit.name)
    size = library.workspace(arguments)
    # torch's allocator gives memory back to the same stream only, so it may be dropped as soon as the kernel is queued.
    memory = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    library.run(arguments, address(memory) or 0, stream_of(device))


def guarded(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a device the current one, for launches and allocations."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """Returns the address of a device's current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def place(device: torch.device) -> dict[str, int]:
    """Returns what kernels are told of the device."""
    if device.type != "cuda":
        return {"device": 0, "multiprocessors": 1}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": index, "multiprocessors": _multiprocessors(index)}


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
