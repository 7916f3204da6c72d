"""`qsync::pack_bits` and `qsync::unpack_bits`: truth values in a bit each, for masks that wait for the backward pass.

Invariant: what is unpacked is what was packed, whatever the size; the bits of values that lie one after the other in memory, row by row,
do so too.

`qsync::keep`: which values dropout keeps, by the random numbers that stochastic rounding has, in vectors and on all threads.

torch draws for the CPU one value at a time: dropout of a hidden state of BERT-base took a quarter of the time of the largest product of
its layer.

Invariant: a pure function of size, seed, stream and p; the number of a value depends on its index alone, not on strides or threads.

`qsync::gate`: a gradient, but zero where a byte says so.

Why an operator: written with a bool, the bool is what a partitioner of joint graphs may keep for the backward pass; see
`qsync_fx.backend.inductor.recompute_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import SymInt, Tensor

from qsync_fx import _C
from qsync_fx.backend.operators.registration import define, require

BYTE: Final = torch.int8
"""The type of a byte that says yes or no where bools would be read one at a time."""
_IN_BYTES: Final = (torch.bool, BYTE)


def pack_bits(mask: Tensor) -> Tensor:
    """Returns the values of `mask`, bool or zeros and ones of int8, any shape, as uint8, `[(numel + 7) // 8]`.

    The first is the lowest bit of the first byte.
    """
    result: Tensor = torch.ops.qsync.pack_bits.default(mask)
    return result


def unpack_bits(
    bits: Tensor, size: Sequence[int | SymInt], dtype: torch.dtype = torch.bool
) -> Tensor:
    """Returns the mask of a size that `pack_bits` has made `bits` of, row by row in memory, as bool or int8."""
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
        lambda: f"qsync::unpack_bits: truth values are of bool or int8, not of {dtype}",
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
    """Returns bytes of a size, each 0 with probability `p` (to 2**-24), else 1."""
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
    """Returns 0 where `closed` is not 0, whatever the gradient is there, and the gradient elsewhere.

    Args:
        gradient: floating point, any shape.
        closed: int8, same shape.

    Returns:
        The shape and type of `gradient`.
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
