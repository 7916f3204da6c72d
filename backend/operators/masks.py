"""Masks: packed into bits, drawn for dropout, and applied to gradients.

`qsync::pack_bits` and `qsync::unpack_bits` store masks that are saved for backward in one bit per
value, in row-major order. `qsync::keep` draws a dropout mask in vectors and on all threads; torch's
CPU generator draws one value at a time, which took a quarter of the time of a BERT-base layer's
largest product. It is a pure function of size, seed, stream and p: the random number of a value
depends on its index alone, not on strides or threads. `qsync::gate` zeroes a gradient by an int8
mask: a partitioner of joint graphs might save a bool
(`qsync_fx.backend.inductor.recompute_policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import SymInt, Tensor

from qsync_fx import _C
from qsync_fx.backend.operators.registration import define, require

BYTE: Final = torch.int8
"""Mask dtype where bools would be read one at a time."""
_IN_BYTES: Final = (torch.bool, BYTE)


def pack_bits(mask: Tensor) -> Tensor:
    """Return `mask`, bool or int8 zeros and ones, any shape, as uint8, `[(numel + 7) // 8]`.

    The first value is the lowest bit of the first byte.
    """
    result: Tensor = torch.ops.qsync.pack_bits.default(mask)
    return result


def unpack_bits(
    bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype = torch.bool
) -> Tensor:
    """Return the mask of shape `size`, bool or int8, contiguous, that `pack_bits` packed."""
    result: Tensor = torch.ops.qsync.unpack_bits.default(bits, size, dtype)
    return result


def _packed_fake(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


def _unpacked_fake(
    bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype | None = None
) -> Tensor:
    dtype = dtype or torch.bool
    require(
        dtype in _IN_BYTES,
        lambda: f"qsync::unpack_bits: masks are bool or int8, not {dtype}",
    )
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
define(
    "unpack_bits(Tensor bits, SymInt[] size, ScalarType? dtype=None) -> Tensor",
    {"CPU": _unpack},
    _unpacked_fake,
)


def keep(size: Sequence[int | SymInt], seed: Tensor, stream: int, p: float) -> Tensor:
    """Return uint8 values of shape `size`, each 0 with probability `p` (up to 2**-24), else 1."""
    result: Tensor = torch.ops.qsync.keep.default(size, seed, stream, p)
    return result


def _native(size: Sequence[int], seed: Tensor, stream: int, p: float) -> Tensor:
    saved = torch.empty(size, dtype=torch.uint8)
    random = int(seed.item()) & (2**64 - 1), stream & (2**32 - 1)
    _C.keep(saved.data_ptr(), saved.numel(), p, *random, torch.get_num_threads())
    return saved


def _fake(size: Sequence[int | SymInt], seed: Tensor, stream: int, p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.uint8)


define("keep(SymInt[] size, Tensor seed, int stream, float p) -> Tensor", {"CPU": _native}, _fake)


def gate(gradient: Tensor, closed: Tensor) -> Tensor:
    """Return 0 where `closed` is not 0, also for NaN gradients, and the gradient elsewhere.

    Args:
        gradient: floating point, any shape.
        closed: int8, same shape.

    Returns:
        Shape and dtype of `gradient`.
    """
    result: Tensor = torch.ops.qsync.gate.default(gradient, closed)
    return result


def _select(gradient: Tensor, closed: Tensor) -> Tensor:
    return torch.where(closed != 0, 0.0, gradient)


define(
    "gate(Tensor gradient, Tensor closed) -> Tensor",
    {"CompositeExplicitAutograd": _select},
    _select,
)
