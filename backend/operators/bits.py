"""`qsync::pack_bits` and `qsync::unpack_bits`: truth values in a bit each, for masks that wait for the backward pass.

Invariant: what is unpacked is what was packed, whatever the size; the bits of values that lie one after the other in memory, row by row,
do so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import SymInt, Tensor

from qsync_fx import _C
from qsync_fx.backend.operators.library import define, require

BYTE: Final = torch.int8
"""The type of a byte that says yes or no where bools would be read one at a time."""
_IN_BYTES: Final = (torch.bool, BYTE)


def pack_bits(mask: Tensor) -> Tensor:
    """Returns the values of `mask`, bool or zeros and ones of int8, any shape, as uint8, `[(numel + 7) // 8]`.

    The first is the lowest bit of the first byte.
    """
    found: Tensor = torch.ops.qsync.pack_bits.default(mask)
    return found


def unpack_bits(bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype = torch.bool) -> Tensor:
    """Returns the mask of a size that `pack_bits` has made `bits` of, row by row in memory, as bool or int8."""
    found: Tensor = torch.ops.qsync.unpack_bits.default(bits, size, dtype)
    return found


def _packed_fake(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


def _unpacked_fake(bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or torch.bool
    require(dtype in _IN_BYTES, lambda: f"qsync::unpack_bits: truth values are of bool or int8, not of {dtype}")
    return bits.new_empty(size, dtype=dtype)


def _pack(mask: Tensor) -> Tensor:
    assert mask.dtype in _IN_BYTES
    rows, bits = mask.contiguous(), _packed_fake(mask)
    _C.pack_bits(rows.data_ptr(), bits.data_ptr(), rows.numel(), torch.get_num_threads())
    return bits


def _unpack(bits: Tensor, size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    mask, rows = _unpacked_fake(bits, size, dtype), bits.contiguous()
    assert rows.numel() == (mask.numel() + 7) // 8
    _C.unpack_bits(rows.data_ptr(), mask.data_ptr(), mask.numel(), torch.get_num_threads())
    return mask


define("pack_bits(Tensor mask) -> Tensor", {"CPU": _pack}, _packed_fake)
define("unpack_bits(Tensor bits, SymInt[] size, ScalarType? dtype=None) -> Tensor", {"CPU": _unpack}, _unpacked_fake)
