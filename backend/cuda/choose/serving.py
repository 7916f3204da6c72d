"""Which problems a kernel serves; what is against it is a clause that reports show as it is.

Invariant: asked of valid configurations (`rules.problems`) alone. Nothing here looks at a device.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.kernel.hardware import size_of
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.source import conv_source, gemm_source

_LARGEST: Final = (1 << 31) - 1
_ACROSS: Final = (1 << 16) - 1  # threadblocks that a grid has in its second dimension
_BYTES: Final = 2**31  # a tensor of a convolution has fewer: offsets are of 32 bits
_CORNER: Final = 127  # TMA tells how far a filter reaches beyond an image in eight bits, with a sign
_FILTER: Final = 32  # CUTLASS 2.x keeps a bit for each row and column of the filter


def serves(config: KernelConfig, problem: Problem) -> str | None:
    """Returns why a valid configuration does not serve a problem: a clause; None if it does."""
    if isinstance(problem, ConvProblem):
        if config.operation != problem.operation:
            return f"it computes {config.operation}, not {problem.operation}"
        return _unsuited(config, problem) or _conv_unfit(config, problem) or _conv_misaligned(config, problem)
    if config.operation != "gemm":
        return f"it computes a convolution ({config.operation})"
    return _unsuited(config, problem) or _gemm_misplaced(config, problem) or _gemm_misaligned(config, problem)


def _unsuited(config: KernelConfig, problem: Problem) -> str | None:
    if (config.a, config.b) != (problem.a, problem.b):
        return f"it multiplies {config.a} by {config.b}, not {problem.a} by {problem.b}"
    if config.out != problem.out:
        return f"its output is {config.out}, not {problem.out}"
    if config.a_scale == "none" and (problem.a_scale, problem.b_scale) != ("none", "none"):
        return "it reads no scales"
    if problem.bias and not config.bias:
        return "it adds no bias"
    return None


def _gemm_misplaced(config: KernelConfig, problem: GemmProblem) -> str | None:
    if (config.a_major, config.b_major) != (problem.a_major, problem.b_major):
        return f"it takes a by {config.a_major}s and b by {config.b_major}s, not by {problem.a_major}s and {problem.b_major}s"
    return None


def _gemm_misaligned(config: KernelConfig, problem: GemmProblem) -> str | None:
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    if not all(1 <= size <= _LARGEST for size in sizes.values()):
        return f"sizes are from 1 to {_LARGEST}"
    longest = gemm_source.LARGEST_K.get(problem.a, problem.k)
    if problem.k > longest:
        return f"k = {problem.k} is above {longest}: sums of products may leave 32 bits"
    multiples = (
        ("k" if config.a_major == "row" else "m", config.alignment),
        ("k" if config.b_major == "column" else "n", config.alignment),
        ("n", config.out_alignment),
    )
    for name, multiple in multiples:
        if sizes[name] % multiple:
            return f"{name} = {sizes[name]} is no multiple of {multiple}"
    if not gemm_source.hopper(config) and -(-problem.n // config.tile[1]) > _ACROSS:
        return f"n = {problem.n} has more than {_ACROSS} tiles of {config.tile[1]}"
    return None


def _conv_unfit(config: KernelConfig, problem: ConvProblem) -> str | None:
    if problem.a_scale == "channel" or (problem.b_scale == "channel" and problem.operation != "fprop"):
        return "scales that vary along the sum, or along pixels, cannot be applied after it"
    positive = (problem.n, problem.h, problem.w, problem.c, problem.k, problem.r, problem.s)
    if min(*positive, *problem.stride, *problem.dilation) < 1 or min(problem.padding) < 0:
        return "sizes, strides and dilations are at least 1, paddings at least 0"
    if min(problem.p, problem.q) < 1:
        return "the filter is larger than the image"
    strided = problem.stride != (1, 1)
    if problem.operation == "dgrad" and strided != config.strided:
        return f"it serves {'strided' if config.strided else 'unit'} strides alone"
    if problem.operation == "dgrad" and strided and problem.dilation != (1, 1):
        return "input gradients of convolutions both strided and dilated are not provided"
    reach = [dilation * (size - 1) for dilation, size in zip(problem.dilation, (problem.r, problem.s), strict=True)]
    if conv_source.hopper(config):
        if max(*reach, *problem.padding) > _CORNER:
            return f"TMA reaches {_CORNER} pixels beyond an image"
        if max(problem.stride) > 8:
            return "TMA has strides up to 8"
    elif max(problem.r, problem.s) > _FILTER:
        return f"filters have up to {_FILTER} rows and columns"
    return None


def _conv_misaligned(config: KernelConfig, problem: ConvProblem) -> str | None:
    last = {"fprop": "k", "dgrad": "c", "wgrad": "c"}[problem.operation]
    multiples = [("c", config.alignment), (last, config.out_alignment)]
    if problem.operation != "fprop":
        multiples.append(("k", config.alignment))
    for name, multiple in multiples:
        if (size := getattr(problem, name)) % multiple:
            return f"{name} = {size} is no multiple of {multiple}"
    x = problem.n * problem.h * problem.w * problem.c
    weight = problem.k * problem.r * problem.s * problem.c
    y = problem.n * problem.p * problem.q * problem.k
    a, b, d = {"fprop": (x, weight, y), "dgrad": (y, weight, x), "wgrad": (y, x, weight)}[problem.operation]
    # Sums of convolutions with 16-bit results are staged as FP32, and CUTLASS counts the result as such.
    if max(a * size_of(config.a), b * size_of(config.b), 4 * d) >= _BYTES:
        return "a tensor has 2 GiB or more (of a result, counted as FP32)"
    columns = {"fprop": problem.k, "dgrad": problem.c, "wgrad": problem.r * problem.s * problem.c}[problem.operation]
    if -(-columns // config.tile[1]) > _ACROSS:
        return f"the result has more than {_ACROSS} tiles of {config.tile[1]} columns"
    return None
