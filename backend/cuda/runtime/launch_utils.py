"""Common parts of every launch: library lookup, device guard, workspace, queueing, fallback log.

Invariant: no function waits for the device on the normal path. No kernel is compiled while a CUDA
graph is captured; torch computes for a kernel that is not loaded by then. GEMMs and convolutions
are not compiled during a training step either: they are compiled with the graph.

The fallback log (`note`, `reasons`) stores the latest reason per problem, for a bounded number of
problems, since the number of shapes is unbounded.
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
    """Record why torch computes a problem; replace an earlier reason."""
    with _lock:
        _kept[problem] = reason
        _kept.move_to_end(problem)
        if len(_kept) > _MOST:
            _kept.popitem(last=False)


def reasons() -> dict[str, str]:
    """Return problem -> reason for all problems that torch computed, latest last."""
    with _lock:
        return dict(_kept)


def forget() -> None:
    """Drop all reasons."""
    with _lock:
        _kept.clear()


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
    if result is None:
        when = (
            "CUDA graph capture began"
            if captures
            else "training began, and a step never waits for a compiler"
        )
        note(shown, f"its kernel was not loaded before {when}")
    return result


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def address(t: Tensor | None) -> int | None:
    """Return the data pointer of a tensor; None, a null pointer for kernels, without a tensor."""
    return None if t is None else t.data_ptr()


def asked(library: Library, arguments: Arguments) -> int:
    """Return the workspace bytes of a kernel; raise `KernelError` if it rejects the arguments."""
    why = library.can_implement(arguments)
    if why is not None:
        raise KernelError(
            f"its kernel does not support these operands: {why}", where=library.unit.name
        )
    return library.workspace(arguments)


def queue(library: Library, arguments: Arguments, size: int, device: torch.device) -> None:
    """Allocate the workspace and queue a kernel on the current stream.

    Args:
        arguments: arguments that the kernel accepts.
        size: bytes of the workspace.
        device: the current device.

    Raises:
        LaunchError: the kernel cannot be launched. A pending asynchronous error of earlier work is
            raised as torch's own error.
    """
    # The caching allocator reuses the memory only on the same stream, so the reference may be
    # dropped once the kernel is queued.
    memory = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    place, stream = address(memory) or 0, stream_of(device)
    try:
        library.run(arguments, place, stream)
    except LaunchError:
        if capturing(device):
            raise
        if device.type == "cuda":
            # Surface an asynchronous error of earlier work as torch's own error.
            torch.cuda.synchronize(device)
        # The first attempt reported and cleared a stale error, so try once more.
        library.run(arguments, place, stream)


def run(library: Library, arguments: Arguments, device: torch.device) -> None:
    """Check arguments, allocate a workspace and queue a kernel; raise `KernelError` on failure."""
    queue(library, arguments, asked(library, arguments), device)


def failed(library: Library, shown: str, error: KernelError) -> None:
    """Record a kernel failure for the problem `shown`.

    A kernel that cannot be launched is switched off for this process, with one warning.
    """
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


def elsewhere(device: torch.device) -> bool:
    """Return whether a device must be made current for launches and allocations."""
    return device.type == "cuda" and device.index not in (None, torch._C._cuda_getDevice())


def guarded(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes a device current for launches and allocations."""
    return torch.cuda.device(device) if elsewhere(device) else _AS_IT_IS


_AS_IT_IS = contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """Return the handle of a device's current stream; 0 for devices other than CUDA."""
    if device.type != "cuda":
        return 0
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def place(device: torch.device) -> dict[str, int]:
    """Return the arguments that describe the device to a kernel."""
    if device.type != "cuda":
        return {"device": 0, "multiprocessors": 1}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": index, "multiprocessors": _multiprocessors(index)}


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
