"""Padding and layout change of problems, so that kernels can compute them.

Tensor cores load 16 bytes at a time, and INT8 and FP8 only contiguous along k, so other operands
are copied. Copies cost bandwidth: a kernel must not move more bytes than torch's own product.
Padding with zeros does not change a sum over k; rows beyond m and columns beyond n are cut off.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import ConvProblem, Major, Problem, type_of

VECTOR: Final = 16
"""Bytes per load."""

MOST_WORK: Final = 2.0
"""Largest ratio of padded to original work: narrow formats are about twice as fast as BF16."""


def alternatives(problem: Problem) -> list[Problem]:
    """Return the distinct forms of a problem: itself, padded, K-major, and padded K-major."""
    if isinstance(problem, ConvProblem):
        return list(dict.fromkeys([problem, filled(problem)]))
    along_k = replace(problem, a_major="row", b_major="column")
    return list(dict.fromkeys([problem, filled(problem), along_k, filled(along_k)]))


def filled(problem: Problem) -> Problem:
    """Return the problem with all contiguous sizes, also in `d`, padded to 16 bytes."""
    if isinstance(problem, ConvProblem):
        # c and k are each the innermost dimension of some of the three tensors.
        step = VECTOR // min(type_of(fmt).itemsize for fmt in (problem.a, problem.b, problem.out))
        return replace(problem, c=_up(problem.c, step), k=_up(problem.k, step))
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    inner_a = {"row": "k", "column": "m"}[problem.a_major]
    inner_b = {"row": "n", "column": "k"}[problem.b_major]
    steps = {"m": 1, "n": VECTOR // type_of(problem.out).itemsize, "k": 1}
    for name, fmt in ((inner_a, problem.a), (inner_b, problem.b)):
        steps[name] = max(steps[name], VECTOR // type_of(fmt).itemsize)
    m, n, k = (_up(size, steps[name]) for name, size in sizes.items())
    return replace(problem, m=m, n=n, k=k)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def pays(problem: Problem, used: Problem) -> bool:
    """Return whether a kernel as `used` moves no more bytes than torch, without too much work."""
    if problem == used:
        return True
    work = used.flops / problem.flops
    return work <= MOST_WORK and moved(problem, used) <= moved_by_torch(problem)


def moved(problem: Problem, used: Problem) -> int:
    """Return the bytes moved by a kernel that runs `problem` as `used`, copies included."""
    before, after = _bytes(problem), _bytes(used)
    total = sum(after)
    for index, copy in enumerate(copied(problem, used)):
        if copy:
            total += before[index] + after[index]
    if before[2] != after[2]:
        total += 2 * before[2]
    return total


def copied(problem: Problem, used: Problem) -> tuple[bool, bool]:
    """Return whether `a` and `b` must be copied for a kernel that runs `problem` as `used`."""
    (a, b, _), (used_a, used_b, _) = problem.shapes, used.shapes
    transposed = [old != new for old, new in zip(_along_k(problem), _along_k(used), strict=True)]
    return a != used_a or transposed[0], b != used_b or transposed[1]


def moved_by_torch(problem: Problem) -> int:
    """Return the bytes that torch moves, including casts to BF16, copies and an epilogue."""
    *operands, total = _bytes(problem)
    scaled = (problem.a_scale, problem.b_scale) != ("none", "none")
    if scaled or problem.bias or problem.out != problem.a:
        # The FP32 product is written, and read again by the epilogue with scales and bias.
        total += 8 * math.prod(problem.shapes[2])
    formats = (problem.a, problem.b)
    for size, fmt, along_k in zip(operands, formats, _along_k(problem), strict=True):
        if type_of(fmt).itemsize > 1:
            total += size
        elif not _has_unit(problem):
            # The cast reads one byte and writes two, which the product reads.
            total += 5 * size
        else:
            # INT8 operands that are not contiguous along k are copied for torch as for a kernel.
            total += size if along_k else 3 * size
    return total


def _along_k(problem: Problem) -> tuple[bool, bool]:
    if isinstance(problem, ConvProblem):
        return True, True
    return problem.a_major == "row", problem.b_major == "column"


def _has_unit(problem: Problem) -> bool:
    """Return whether torch multiplies one-byte operands without a cast."""
    if isinstance(problem, ConvProblem):
        return False
    if problem.a == "int8":
        return reference_result.takes_integers(problem.m, problem.n, problem.k)
    return all(_along_k(problem)) and problem.n % VECTOR == 0 and problem.k % VECTOR == 0


def _bytes(problem: Problem) -> list[int]:
    """Return the bytes of the operands and of the result."""
    formats = (problem.a, problem.b, problem.out)
    sizes = map(math.prod, problem.shapes)
    return [size * type_of(fmt).itemsize for size, fmt in zip(sizes, formats, strict=True)]


def laid_out(matrix: Tensor, rows: int, columns: int, method: Major) -> Tensor:
    """Return a 16-byte aligned copy of a matrix in a layout, zero-padded to [rows, columns]."""
    if method == "column":
        return laid_out(matrix.t(), columns, rows, "row").t()
    result = _memory(matrix, tuple(matrix.shape), (rows, columns))
    result[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
    return result


def channels_last(t: Tensor, first: int, second: int) -> Tensor:
    """Return a channels-last copy of `[d0, d1, h, w]`, zero-padded to [`first`, `second`, h, w]."""
    images, channels, h, w = t.shape
    memory = _memory(t, (images, h, w, channels), (first, h, w, second))
    result = memory.permute(0, 3, 1, 2)
    result[:images, :channels].copy_(t)
    return result


def _memory(like: Tensor, shape: tuple[int, ...], padded: tuple[int, ...]) -> Tensor:
    """Return a dense tensor of the shape `padded`, zero if that is larger than `shape`."""
    if shape == padded:
        return like.new_empty(padded)
    # Zero has all bits zero in every format here, and not every torch fills FP8.
    size = (*padded[:-1], padded[-1] * like.itemsize)
    return torch.zeros(size, dtype=torch.uint8, device=like.device).view(like.dtype)


def filled_vector(t: Tensor, size: int) -> Tensor:
    """Return a contiguous FP32 vector, zero-padded to `size`; a single number (0-d) unchanged."""
    if t.dim() == 0:
        return t
    flat = t.reshape(-1).to(torch.float32)
    if flat.shape[0] == size:
        return flat.contiguous()
    result = flat.new_zeros(size)
    result[: flat.shape[0]].copy_(flat)
    return result
