"""What the kernels of codecs take: addresses of memory that is long enough, and as many threads as torch has.

Invariant: nothing reaches a kernel that it could read or write beyond.
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


def put(found: Tensor, values: Tensor, add: bool) -> None:
    """Writes what operators have decoded, or adds it to what is there."""
    if add:
        values += found
    else:
        values.copy_(found)


def floats(values: Tensor) -> int:
    """Returns the address of FP32 values on the CPU that lie side by side."""
    if values.dtype != torch.float32 or values.device.type != "cpu" or not values.is_contiguous():
        raise QSyncError(f"codecs take contiguous FP32 values on the CPU, not {values.dtype} on {values.device}")
    return values.data_ptr()


def bytes_of(wire: Tensor, least: int) -> int:
    """Returns the address of so many bytes on the CPU at the least."""
    if wire.dtype != torch.uint8 or wire.device.type != "cpu" or not wire.is_contiguous() or wire.numel() < least:
        raise QSyncError(f"{least} contiguous bytes on the CPU are asked for, not {wire.numel()} of {wire.dtype}")
    return wire.data_ptr()


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
