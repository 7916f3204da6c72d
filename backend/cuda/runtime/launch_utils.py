"""What every call of a kernel needs: the library or the reason why there is none, the device and its stream, memory to work in.

Invariant: nothing waits for the device, and while a CUDA graph is captured nothing is compiled: a kernel that is not loaded by then is
torch's to compute. Nor is a product compiled in the middle of a training step: what a graph needs was compiled with it.

Why torch computed what a kernel might have: kept while a process runs, for who wonders where the speed went.

Invariant: one sentence a problem and reason, and a bounded number of them: shapes may be without end.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Arguments, Library
from qsync_fx.errors import KernelError, LaunchError, PlanWarning, QSyncError

_MOST: Final = 1000
_lock: Final = threading.Lock()
_kept: Final[OrderedDict[str, str]] = OrderedDict()


def note(problem: str, reason: str) -> None:
    """Keeps why torch computes a problem; the latest reason counts."""
    with _lock:
        _kept[problem] = reason
        _kept.move_to_end(problem)
        if len(_kept) > _MOST:
            _kept.popitem(last=False)


def reasons() -> dict[str, str]:
    """Returns problem -> reason for what torch has computed in this process, the latest last."""
    with _lock:
        return dict(_kept)


def forget() -> None:
    """Drops all reasons."""
    with _lock:
        _kept.clear()


def library(unit: TranslationUnit, device: torch.device, shown: str) -> Library | None:
    """Returns the library of a unit; None, with a reason kept for what is `shown`, where torch is to compute."""
    captures = capturing(device)
    may_read = not captures and (
        not unit.templates or kernel_registry.compiles_late() or kernel_registry.stored(unit)
    )
    try:
        result = kernel_registry.library(unit, wait=may_read)
    except QSyncError as error:
        note(shown, error.what)
        return None
    if result is None:
        when = (
            "a CUDA graph was captured"
            if captures
            else "training began, and no step waits for a compiler"
        )
        note(shown, f"its kernel was not loaded before {when}")
    return result


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def address(t: Tensor | None) -> int | None:
    """Returns where a tensor's values start; None, which kernels see as a null pointer, where there is none."""
    return None if t is None else t.data_ptr()


def asked(library: Library, arguments: Arguments) -> int:
    """Returns how many bytes of memory a kernel needs for arguments; raises `KernelError` where it does not take them."""
    why = library.can_implement(arguments)
    if why is not None:
        raise KernelError(
            f"its kernel does not take these operands: {why}", where=library.unit.name
        )
    return library.workspace(arguments)


def queue(library: Library, arguments: Arguments, size: int, device: torch.device) -> None:
    """Gives a kernel that takes arguments its memory and queues it on the current stream of a device, which is the current one.

    Raises:
        LaunchError: it cannot be started. What failed before it, and shows only now, is raised as what it is.
    """
    # torch's allocator gives memory back to the same stream only, so it may be dropped as soon as the kernel is queued.
    memory = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    place, stream = address(memory) or 0, stream_of(device)
    try:
        library.run(arguments, place, stream)
    except LaunchError:
        if capturing(device):
            raise
        if device.type == "cuda":
            # What ran before and has failed shows here, as an error of torch.
            torch.cuda.synchronize(device)
        # An error that nobody had read was told with the first try, and is gone with it.
        library.run(arguments, place, stream)


def run(library: Library, arguments: Arguments, device: torch.device) -> None:
    """Asks a kernel whether it takes arguments, gives it memory and queues it on the current stream; raises `KernelError`."""
    queue(library, arguments, asked(library, arguments), device)


def failed(library: Library, shown: str, error: KernelError) -> None:
    """Notes that a kernel could not be used for what is `shown`; one that cannot be started is switched off, which is said once."""
    note(shown, error.what)
    if not isinstance(error, LaunchError) or kernel_registry.failure(library.unit) is not None:
        return
    kernel_registry.switch_off(library.unit, error)
    warnings.warn(
        f"the kernel {library.unit.name} is switched off until this process ends, and others or torch compute in its place: {error.what}. "
        f"It was called for {shown}. Training goes on, with the same numbers; qsync doctor tells of the device and its driver.",
        PlanWarning,
        stacklevel=2,
    )


def elsewhere(device: torch.device) -> bool:
    """Whether a device has to be made the current one for launches and allocations."""
    return device.type == "cuda" and device.index not in (None, torch._C._cuda_getDevice())


def guarded(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a device the current one, for launches and allocations."""
    return torch.cuda.device(device) if elsewhere(device) else _AS_IT_IS


_AS_IT_IS = contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """Returns the address of a device's current stream."""
    if device.type != "cuda":
        return 0
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


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
