"""Common parts of launches: library lookup, device guard, workspace, queueing, fallback log.

Launches do not wait for the device on the normal path. Kernels are not compiled while a CUDA graph
is captured, and GEMMs and convolutions are compiled with their graph, not during a training step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict
from typing import Final, TypeVar

import torch

from qsync_fx import torch_internals as internals
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Arguments, Library
from qsync_fx.backend.cuda.runtime.device_state import WHEN_FORGOTTEN
from qsync_fx.errors import KernelError, LaunchError, PlanWarning, QSyncError

_MOST_REASONS: Final = 1000
_MOST_CALLS: Final = 4096

Key = tuple[object, ...]
T = TypeVar("T")


class CallCache(dict[Key, T]):
    """Cache of call sites by what determines them, such as shapes and addresses modulo 16 bytes.

    It is cleared when it is full, and when cached device decisions become invalid.
    """

    def __init__(self) -> None:
        super().__init__()
        WHEN_FORGOTTEN.append(self.clear)

    def keep(self, key: Key, site: T) -> T:
        """Store a site and return it."""
        if len(self) >= _MOST_CALLS:
            self.clear()
        self[key] = site
        return site


_lock: Final = threading.Lock()
_reasons: Final[OrderedDict[str, str]] = OrderedDict()


def note(problem: str, reason: str) -> None:
    """Record why torch computes a problem; replace an earlier reason."""
    with _lock:
        _reasons[problem] = reason
        _reasons.move_to_end(problem)
        if len(_reasons) > _MOST_REASONS:
            _reasons.popitem(last=False)


def reasons() -> dict[str, str]:
    """Return problem -> reason for all problems that torch computed, latest last."""
    with _lock:
        return dict(_reasons)


def forget() -> None:
    """Drop all reasons."""
    with _lock:
        _reasons.clear()


def library(unit: TranslationUnit, device: torch.device, shown: str) -> Library | None:
    """Return the library of a unit; None, with a reason noted for `shown`, for torch."""
    captures = capturing(device)
    may_read = not captures and (
        not unit.templates or kernel_registry.compiles_late() or kernel_registry.stored(unit)
    )
    try:
        result = kernel_registry.library(unit, wait=may_read)
    except QSyncError as error:
        note(shown, error.what)
        return None
    if result is None and captures:
        note(shown, "its kernel was not loaded before CUDA graph capture began")
    elif result is None:
        note(shown, "its kernel was not compiled with the graph; a step never waits for a compiler")
    return result


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def workspace(library: Library, arguments: Arguments) -> int:
    """Return the workspace bytes of a kernel; raise `KernelError` if it rejects the arguments."""
    if why := library.can_implement(arguments):
        message = f"its kernel does not support these operands: {why}"
        raise KernelError(message, where=library.unit.name)
    return library.workspace(arguments)


def queue(library: Library, arguments: Arguments, size: int, device: torch.device) -> None:
    """Allocate a workspace of `size` bytes and queue a kernel on the current stream.

    Raise `LaunchError` if that fails, or torch's error if earlier work has failed.
    """
    # The caching allocator reuses the memory only on the same stream, so the reference may be
    # dropped once the kernel is queued.
    address, stream = 0, stream_of(device)
    if size:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        address = memory.data_ptr()
    try:
        library.run(arguments, address, stream)
    except LaunchError:
        if capturing(device):
            raise
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # The first attempt reported and cleared a stale error, so try once more.
        library.run(arguments, address, stream)


def run(library: Library, arguments: Arguments, device: torch.device) -> None:
    """Check arguments, allocate a workspace and queue a kernel; raise `KernelError` on failure."""
    queue(library, arguments, workspace(library, arguments), device)


def failed(library: Library, shown: str, error: KernelError) -> None:
    """Record a kernel failure; switch off a kernel that cannot be launched, with one warning."""
    note(shown, error.what)
    if not isinstance(error, LaunchError) or kernel_registry.failure(library.unit) is not None:
        return
    kernel_registry.switch_off(library.unit, error)
    warnings.warn(
        f"the kernel {library.unit.name} failed and is disabled until this process ends; other "
        f"kernels or torch replace it: {error.what}. It was launched for {shown}. Training "
        "continues with the same numbers. Run `qsync doctor` to check the device and its driver.",
        PlanWarning,
        stacklevel=2,
    )


_AS_IT_IS: Final = contextlib.nullcontext()


def guarded(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes a device current for launches and allocations."""
    if device.type != "cuda" or device.index in (None, internals._cuda_getDevice()):
        return _AS_IT_IS
    return torch.cuda.device(device)


def stream_of(device: torch.device) -> int:
    """Return the handle of a device's current stream; 0 for devices other than CUDA."""
    if device.type != "cuda":
        return 0
    index = internals._cuda_getDevice() if device.index is None else device.index
    return int(internals._cuda_getCurrentRawStream(index))


def device_arguments(device: torch.device) -> dict[str, int]:
    """Return the arguments that describe the device to a kernel."""
    if device.type != "cuda":
        return {"device": 0, "multiprocessors": 1}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": index, "multiprocessors": _multiprocessors(index)}


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
