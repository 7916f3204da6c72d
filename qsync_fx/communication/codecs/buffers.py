"""Where codecs read and write: for kernels addresses of memory that is long enough, and as many threads as torch has; for other devices
memory beside their values, and on the host for what ranks send each other.

Invariant: nothing reaches a kernel that it could read or write beyond. Values and the bytes that are made of them lie on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx.errors import QSyncError


def kernels() -> Any:
    """Returns the native module.

    Raises:
        QSyncError: it is older than its Python, as after an update without another build.
    """
    from qsync_fx import _C

    if not hasattr(_C, "qsgd_encode"):
        raise QSyncError(
            "the native module has no codecs of gradients: it is older than the rest of qsync_fx",
            where=str(_C.__file__),
            do="build it again: pip install .",
        )
    return _C


def native(values: Tensor) -> bool:
    """Whether our kernels can take values; on other devices than the CPU torch operators do the same (`operators`)."""
    return values.device.type == "cpu"


def host(nbytes: int, device: torch.device) -> Tensor:
    """Returns bytes on the host, sent and received, of values on a device: pinned, so that it copies them at the speed of its bus."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def beside(wire: Tensor, values: Tensor) -> Tensor:
    """Returns memory for these bytes of the host where values lie: the bytes themselves on the CPU, else new memory, not filled."""
    return wire if native(values) else torch.empty_like(wire, device=values.device)


def taken_to(wire: Tensor, values: Tensor) -> Tensor:
    """Returns bytes of the host where values lie; what is queued on their device from here on finds them there."""
    return wire if native(values) else wire.to(values.device, non_blocking=True, copy=True)


def finished(values: Tensor) -> None:
    """Returns when what was queued on a device is done: bytes of the host that it reads may be written to."""
    if values.device.type == "cuda":
        torch.cuda.current_stream(values.device).synchronize()


def put(result: Tensor, values: Tensor, add: bool) -> None:
    """Writes what operators have decoded, or adds it to what is there."""
    if add:
        values += result
    else:
        values.copy_(result)


def floats(values: Tensor) -> int:
    """Returns the address of FP32 values on the CPU that lie side by side."""
    if values.dtype != torch.float32 or values.device.type != "cpu" or not values.is_contiguous():
        raise QSyncError(
            f"codecs take contiguous FP32 values on the CPU, not {values.dtype} on {values.device}"
        )
    return values.data_ptr()


def bytes_of(wire: Tensor, least: int) -> int:
    """Returns the address of so many bytes on the CPU at the least."""
    if (
        wire.dtype != torch.uint8
        or wire.device.type != "cpu"
        or not wire.is_contiguous()
        or wire.numel() < least
    ):
        raise QSyncError(
            f"{least} contiguous bytes on the CPU are asked for, not {wire.numel()} of {wire.dtype}"
        )
    return wire.data_ptr()


def long_enough(wire: Tensor, least: int) -> None:
    """Raises `QSyncError` where there are fewer bytes than these, on whichever device."""
    if wire.dtype != torch.uint8 or not wire.is_contiguous() or wire.numel() < least:
        raise QSyncError(
            f"{least} contiguous bytes are asked for, not {wire.numel()} of {wire.dtype}"
        )


def same_size(values: Tensor, residual: Tensor | None) -> int:
    """Returns the address of the residual of values; 0 where there is none."""
    if residual is None:
        return 0
    if residual.numel() != values.numel():
        raise QSyncError(f"a residual of {residual.numel()} values for {values.numel()}")
    return floats(residual)


def threads() -> int:
    """Returns as many threads as torch has."""
    return torch.get_num_threads()
