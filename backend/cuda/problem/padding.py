"""Padding and layout change of problems, so that kernels can compute them.

Tensor cores load 16 bytes at a time, so contiguous sizes must be multiples of 16 bytes. INT8 and
FP8 tensor cores also require operands contiguous along k. Other operands are copied. Copies cost
bandwidth, so the kernel must not move more bytes than torch's own product, and padding must not
more than double the work.

Invariant: a padded problem has the values of the original in the original's region. Zeros do
not change a sum over k; rows beyond m and columns beyond n are cut off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import ConvProblem, GemmProblem, Major, Problem
from qsync_fx.backend.cuda.problem.problem_from_tensors import type_of

VECTOR: Final = 16
"""Bytes per load."""

MOST_WORK: Final = 2.0
"""Largest ratio of padded to original work.

Narrow formats are about twice as fast as BF16, so more padding cannot gain.
"""


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
    return replace(problem, **{name: _up(size, steps[name]) for name, size in sizes.items()})


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def pays(problem: Problem, used: Problem) -> bool:
    """Return whether running `problem` as `used` pays.

    It must move no more bytes than torch, for at most `MOST_WORK` times the work.
    """
    if problem == used:
        return True
    work = used.flops / problem.flops
    return work <= MOST_WORK and moved(problem, used) <= moved_by_torch(problem)


def moved(problem: Problem, used: Problem) -> int:
    """Return the bytes read and written by a kernel that runs `problem` as `used`, copies included.

    A copy reads the original and writes the padded operand in one pass, transposed or not (see
    `layout_convert`).
    """
    total = 0
    for before, after, copy in zip(
        _operands(problem), _operands(used), copied(problem, used), strict=True
    ):
        total += after
        if copy:
            total += before + after
    before, after = _output(problem), _output(used)
    if before != after:
        total += 2 * before
    return total + after


def copied(problem: Problem, used: Problem) -> tuple[bool, bool]:
    """Return whether `a` and `b` must be copied for a kernel that runs `problem` as `used`."""
    if isinstance(problem, GemmProblem) and isinstance(used, GemmProblem):
        a = (problem.m, problem.k, problem.a_major) != (used.m, used.k, used.a_major)
        return a, (problem.k, problem.n, problem.b_major) != (used.k, used.n, used.b_major)
    first, second = (
        size != other for size, other in zip(_operands(problem), _operands(used), strict=True)
    )
    return first, second


def moved_by_torch(problem: Problem) -> int:
    """Return the bytes that torch's own product moves.

    They include casts to BF16 for formats without a unit, copies, and a separate epilogue.
    """
    size, out = _output(problem), type_of(problem.out).itemsize
    scaled = (problem.a_scale, problem.b_scale) != ("none", "none")
    bare = not (scaled or problem.bias or problem.out != problem.a)
    # The FP32 product is written, and read again by the epilogue with scales and bias.
    total = size
    if not bare:
        total += size // out * 8
    operands = zip(_operands(problem), (problem.a, problem.b), _along_k(problem), strict=True)
    for bytes_, fmt, along_k in operands:
        if type_of(fmt).itemsize > 1:
            total += bytes_
        elif not _has_unit(problem):
            # The cast reads one byte and writes two, which the product reads.
            total += 5 * bytes_
        elif along_k:
            total += bytes_
        else:
            # INT8 operands that are not contiguous along k are copied for torch as for a kernel.
            total += 3 * bytes_
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


def _operands(problem: Problem) -> tuple[int, int]:
    if isinstance(problem, GemmProblem):
        sizes = problem.m * problem.k, problem.k * problem.n
    else:
        x, weight, y = _elements(problem)
        sizes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[problem.operation]
    return sizes[0] * type_of(problem.a).itemsize, sizes[1] * type_of(problem.b).itemsize


def _output(problem: Problem) -> int:
    if isinstance(problem, GemmProblem):
        size = problem.m * problem.n
    else:
        x, weight, y = _elements(problem)
        size = {"fprop": y, "dgrad": x, "wgrad": weight}[problem.operation]
    return size * type_of(problem.out).itemsize


def _elements(p: ConvProblem) -> tuple[int, int, int]:
    return p.n * p.h * p.w * p.c, p.k * p.r * p.s * p.c, p.n * p.p * p.q * p.k


def laid_out(matrix: Tensor, rows: int, columns: int, method: Major) -> Tensor:
    """Return a 16-byte aligned copy of a matrix, zero-padded to [rows, columns].

    Args:
        method: layout of the copy.
    """
    if method == "column":
        return laid_out(matrix.t(), columns, rows, "row").t()
    full = tuple(matrix.shape) == (rows, columns)
    result = matrix.new_empty((rows, columns)) if full else _zeros(matrix, (rows, columns))
    result[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
    return result


def channels_last(t: Tensor, first: int, second: int) -> Tensor:
    """Return a channels-last copy of `[d0, d1, h, w]`, zero-padded to [`first`, `second`, h, w]."""
    shape = (first, int(t.shape[2]), int(t.shape[3]), second)
    full = tuple(t.shape[:2]) == (first, second)
    made = t.new_empty(shape) if full else _zeros(t, shape)
    result = made.permute(0, 3, 1, 2)
    result[: t.shape[0], : t.shape[1]].copy_(t)
    return result


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Zero has all bits zero in every format here, and not every torch fills FP8.
    return torch.zeros(
        shape[0], *shape[1:-1], shape[-1] * like.itemsize, dtype=torch.uint8, device=like.device
    ).view(like.dtype)


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
