"""Buffers of codecs: checked addresses for native kernels, host buffers, and copies to devices.

Invariant: a kernel gets only contiguous memory of sufficient length. Values and their coded bytes
are on the same device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx.errors import QSyncError


def kernels() -> Any:
    """Return the native module.

    Raises:
        QSyncError: the module is older than the Python code, as after an update without a build.
    """
    from qsync_fx import _C

    if not hasattr(_C, "qsgd_encode"):
        raise QSyncError(
            "the native module has no gradient codecs: it is older than the rest of qsync_fx",
            where=str(_C.__file__),
            do="rebuild it with pip install .",
        )
    return _C


def native(values: Tensor) -> bool:
    """Return whether native kernels support the device; others use `torch_kernels`."""
    return values.device.type == "cpu"


def host(nbytes: int, device: torch.device) -> Tensor:
    """Return a host buffer for messages of a device: pinned for CUDA, for faster copies."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def device_buffer(wire: Tensor, values: Tensor) -> Tensor:
    """Return `wire` itself for values on the CPU, else an uninitialized buffer on their device."""
    return wire if native(values) else torch.empty_like(wire, device=values.device)


def on_device_of(wire: Tensor, values: Tensor) -> Tensor:
    """Return host bytes on the device of `values`, valid for work queued from now on."""
    return wire if native(values) else wire.to(values.device, non_blocking=True, copy=True)


def synchronize(values: Tensor) -> None:
    """Wait for the current stream, so that host bytes in use by copies may be overwritten."""
    if values.device.type == "cuda":
        torch.cuda.current_stream(values.device).synchronize()


def put(result: Tensor, values: Tensor, add: bool) -> None:
    if add:
        values += result
    else:
        values.copy_(result)


def floats(values: Tensor) -> int:
    """Return the address of contiguous FP32 values on the CPU."""
    if values.dtype != torch.float32 or not native(values) or not values.is_contiguous():
        raise QSyncError(
            "codecs require contiguous FP32 values on the CPU, "
            f"not {values.dtype} on {values.device}"
        )
    return values.data_ptr()


def long_enough(wire: Tensor, least: int) -> None:
    """Raise `QSyncError` if a buffer has fewer than `least` contiguous bytes, on any device."""
    if wire.dtype != torch.uint8 or not wire.is_contiguous() or wire.numel() < least:
        raise QSyncError(
            f"the buffer needs {least} contiguous bytes, but has {wire.numel()} values of "
            f"{wire.dtype}"
        )


def bytes_of(wire: Tensor, least: int) -> int:
    """Return the address of at least `least` contiguous bytes on the CPU."""
    long_enough(wire, least)
    if not native(wire):
        raise QSyncError(f"the buffer must be on the CPU, not on {wire.device}")
    return wire.data_ptr()


def same_size(values: Tensor, residual: Tensor | None) -> int:
    """Return the address of the error feedback; 0 for None."""
    if residual is None:
        return 0
    if residual.numel() != values.numel():
        raise QSyncError(
            f"the error feedback has {residual.numel()} values for {values.numel()} gradients"
        )
    return floats(residual)
