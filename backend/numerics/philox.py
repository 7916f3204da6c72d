"""Philox4x32-10 random numbers of the CUDA kernels, in torch integers on any device.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
Invariant: the bits of cpp/cutlass/plain/philox.cuh. 32-bit words are stored in int64, whose
products wrap around like uint64's, so the masked high half is the high word.
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
    """Return the block of Philox4x32-10 for counter `(c0, c1, c2, c3)` and key `(k0, k1)`.

    Args and result are int64 words below 2**32: tensors that broadcast, or any type with `*`, `+`,
    `^`, `&`, `>>`, whose constants `number` makes.
    """
    for _ in range(_ROUNDS):
        left, right = c0 * number(0xD2511F53), c2 * number(0xCD9E8D57)
        c0, c2 = high(right, number) ^ c1 ^ k0, high(left, number) ^ c3 ^ k1
        c1, c3 = low(right, number), low(left, number)
        k0, k1 = low(k0 + number(0x9E3779B9), number), low(k1 + number(0xBB67AE85), number)
    return c0, c1, c2, c3


def low(word: Any, number: Callable[[int], Any] = int) -> Any:
    """Return the lower 32 bits of an int64."""
    return word & number(_LOW)


def high(word: Any, number: Callable[[int], Any] = int) -> Any:
    """Return the upper 32 bits of an int64."""
    return low(word >> number(32), number)


def uniform(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Return an odd multiple of 2**-17 in (0, 1) for each element of `like`: FP32, same layout.

    Element `i` in memory uses 16 bits of the block with counter `(i / 8, stream)` and key `seed`,
    as `(bits + 1/2) * 2**-16`. The mean is 1/2, and no number is 0, so exact values are never
    rounded up. Arguments are those of `reference.uniform`.
    """
    seed = seed.to(like.device).reshape(())
    eighth = torch.arange(-(-like.numel() // 8), device=like.device)
    zero = torch.zeros_like(seed)
    counter = eighth & _LOW, eighth >> 32, zero + (stream & _LOW), zero
    words = torch.stack(philox4x32(*counter, low(seed), high(seed)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).reshape(-1)
    return ((halves.float() + 0.5) * 2.0**-16).as_strided(like.size(), like.stride())
