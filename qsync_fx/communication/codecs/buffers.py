"""Buffers of codecs: checked addresses for native kernels, host buffers, and copies to devices.

Invariant: a kernel gets only contiguous memory of sufficient length. Values and their coded bytes
are on the same device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.errors import QSyncError


def native(values: Tensor) -> bool:
    """Return whether native kernels support the device; others use `torch_kernels`."""
    return values.device.type == "cpu"


def host(nbytes: int, device: torch.device) -> Tensor:
    """Return a host buffer for messages of a device: pinned for CUDA, for faster copies."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def device_buffer(wire: Tensor, values: Tensor) -> Tensor:
    """Return `wire` itself if it is on the device of the values, else an uninitialized buffer."""
    if wire.device == values.device:
        return wire
    return torch.empty_like(wire, device=values.device)


def on_device_of(wire: Tensor, values: Tensor) -> Tensor:
    """Return bytes on the device of `values`, valid for work queued from now on."""
    if wire.device == values.device:
        return wire
    return wire.to(values.device, non_blocking=True, copy=True)


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
    return _address(values, torch.float32, 0)


def bytes_of(wire: Tensor, least: int) -> int:
    """Return the address of at least `least` contiguous bytes on the CPU."""
    return _address(wire, torch.uint8, least)


def feedback(residual: Tensor | None, values: Tensor) -> int:
    """Return the address of error feedback for these values; 0 for None."""
    return 0 if residual is None else _address(residual, torch.float32, values.numel())


def long_enough(wire: Tensor, least: int) -> None:
    """Raise `QSyncError` if a buffer has fewer than `least` contiguous bytes, on any device."""
    _check(wire, torch.uint8, least, wire.device.type)


def _address(tensor: Tensor, dtype: torch.dtype, least: int) -> int:
    _check(tensor, dtype, least, "cpu")
    return tensor.data_ptr()


def _check(tensor: Tensor, dtype: torch.dtype, least: int, device: str) -> None:
    usable = tensor.dtype == dtype and tensor.device.type == device and tensor.is_contiguous()
    if not usable or tensor.numel() < least:
        raise QSyncError(
            f"a codec requires at least {least} contiguous values of {dtype} on {device}, not "
            f"{tensor.numel()} of {tensor.dtype} on {tensor.device}"
        )
