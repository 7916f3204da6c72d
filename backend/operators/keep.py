"""`qsync::keep`: which values dropout keeps, by the random numbers that stochastic rounding has, in vectors and on all threads.

torch draws for the CPU one value at a time: dropout of a hidden state of BERT-base took a quarter of the time of the largest product of
its layer.

Invariant: a pure function of size, seed, stream and p; the number of a value depends on its index alone, not on strides or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

from qsync_fx import _C
from qsync_fx.backend.operators.library import define


def keep(size: Sequence[int | SymInt], seed: Tensor, stream: int, p: float) -> Tensor:
    """Returns bytes of a size, each 0 with probability `p` (to 2**-24), else 1."""
    found: Tensor = torch.ops.qsync.keep.default(size, seed, stream, p)
    return found


def _native(size: Sequence[int], seed: Tensor, stream: int, p: float) -> Tensor:
    kept = torch.empty(size, dtype=torch.uint8)
    random = int(seed.item()) & (2**64 - 1), stream & (2**32 - 1)
    _C.keep(kept.data_ptr(), kept.numel(), p, *random, torch.get_num_threads())
    return kept


def _fake(size: Sequence[int | SymInt], seed: Tensor, stream: int, p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.uint8)


define("keep(SymInt[] size, Tensor seed, int stream, float p) -> Tensor", {"CPU": _native}, _fake)
