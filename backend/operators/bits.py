"""`qsync::pack_bits` and `qsync::unpack_bits`: truth values in a bit each, for masks that wait for the backward pass.

Invariant: what is unpacked is what was packed, whatever the size; the bits of values that lie one after the other in memory, row by row,
do so too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

from qsync_fx import _C
from qsync_fx.backend.operators.library import define


def pack_bits(mask: Tensor) -> Tensor:
    """Returns the values of `mask`, bool, any shape, as uint8, `[(numel + 7) // 8]`: the first is the lowest bit of the first byte."""
    found: Tensor = torch.ops.qsync.pack_bits.default(mask)
    return found


def unpack_bits(bits: Tensor, size: Sequence[int | SymInt]) -> Tensor:
    """Returns the mask of a size that `pack_bits` has made `bits` of, row by row in memory."""
    found: Tensor = torch.ops.qsync.unpack_bits.default(bits, size)
    return found


def _packed_fake(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


def _unpacked_fake(bits: Tensor, size: Sequence[int | SymInt]) -> Tensor:
    return bits.new_empty(size, dtype=torch.bool)


def _pack(mask: Tensor) -> Tensor:
    assert mask.dtype == torch.bool
    rows, bits = mask.contiguous(), _packed_fake(mask)
    _C.pack_bits(rows.data_ptr(), bits.data_ptr(), rows.numel(), torch.get_num_threads())
    return bits


def _unpack(bits: Tensor, size: Sequence[int]) -> Tensor:
    mask, rows = _unpacked_fake(bits, size), bits.contiguous()
    assert rows.numel() == (mask.numel() + 7) // 8
    _C.unpack_bits(rows.data_ptr(), mask.data_ptr(), mask.numel(), torch.get_num_threads())
    return mask


define("pack_bits(Tensor mask) -> Tensor", {"CPU": _pack}, _packed_fake)
define("unpack_bits(Tensor bits, SymInt[] size) -> Tensor", {"CPU": _unpack}, _unpacked_fake)
