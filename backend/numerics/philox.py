"""The random numbers of the CUDA kernels, in torch integers, on any device.

Why a second generator: a GPU needs one that gives many bits for few instructions and whose streams are known to be independent; Philox
is that (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The CPU keeps the hash of `reference`,
which its vector units compute faster.

Invariant: cpp/cutlass/plain/philox.cuh computes the same, to the bit. Words of 32 bits stand in int64, whose products wrap around as those
of uint64 do, so all 64 bits of a product are right and the masked high half is the high word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_LOW: Final = 0xFFFFFFFF
_ROUNDS: Final = 10


def philox4x32(
    c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, number: Callable[[int], Any] = int
) -> Any:
    """Returns the block of Philox4x32-10 for counter `(c0, c1, c2, c3)` and key `(k0, k1)`.

    Args:
        c0, c1, c2, c3, k0, k1: int64, each below 2**32: tensors of shapes that broadcast, or what else multiplies, adds and shifts.
        number: makes a constant of the same kind.

    Returns:
        Four words, int64, each below 2**32.
    """
    for _ in range(_ROUNDS):
        left, right = c0 * number(0xD2511F53), c2 * number(0xCD9E8D57)
        c0, c1, c2, c3 = (
            high(right, number) ^ c1 ^ k0,
            low(right, number),
            high(left, number) ^ c3 ^ k1,
            low(left, number),
        )
        k0, k1 = low(k0 + number(0x9E3779B9), number), low(k1 + number(0xBB67AE85), number)
    return c0, c1, c2, c3


def low(word: Any, number: Callable[[int], Any] = int) -> Any:
    """Returns the lower 32 bits of an int64."""
    return word & number(_LOW)


def high(word: Any, number: Callable[[int], Any] = int) -> Any:
    """Returns the upper 32 bits of an int64."""
    return low(word >> number(32), number)


def uniform(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Returns an odd multiple of 2**-17 in (0, 1) for each element of `like`, which must fill its memory without gaps: FP32, same layout.

    Element `i` of memory has sixteen bits of the block with counter `(i / 8, stream)` and key `seed`, and `(bits + 1/2) * 2**-16` of them:
    the mean is 1/2, and no number is 0, so what a format holds exactly is never rounded up.

    Args:
        like: its sizes, strides and device are what counts.
        seed: one int64, `[1]` or `[]`.
        stream: tells operators of one graph apart; its low 32 bits count.
    """
    seed = seed.to(like.device).reshape(())
    eighth = torch.arange(-(-like.numel() // 8), device=like.device)
    zero = torch.zeros_like(seed)
    block = philox4x32(
        eighth & _LOW, eighth >> 32, zero + (stream & _LOW), zero, low(seed), high(seed)
    )
    words = torch.stack(block, -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).reshape(-1)
    return ((halves.float() + 0.5) * 2.0**-16).as_strided(like.size(), like.stride())
