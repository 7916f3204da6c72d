"""Kernel decision for a problem, and the problems that a kernel serves.

`decide` uses the tuning table of the device if it has the problem. Otherwise it chooses torch for
formats in which torch is assumed to be as fast, and a kernel if no other unit supports the format
or if the product is large enough for narrow operands to pay. torch computes problems without a
kernel. `serves` explains as a clause for reports why a valid configuration does not fit.

Invariant: the decision is a function of the problem, the architecture, the candidates and the
table. It needs no tensor and no GPU, so a report can predict it for a device, and a problem always
runs the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig, size_of, wide
from qsync_fx.backend.cuda.problem import padding
from qsync_fx.backend.cuda.problem.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.tuning import NARROW, TunedChoice, TuningTable, work

_LARGEST: Final = (1 << 31) - 1
_ACROSS: Final = (1 << 16) - 1  # limit of the grid's second dimension, in threadblocks
_BYTES: Final = 2**31  # limit of a convolution's tensors: offsets are 32-bit
# TMA encodes the reach of a filter beyond the image as a signed byte.
_CORNER: Final = 127
_FILTER: Final = 32  # CUTLASS 2.x has one mask bit per row and column of the filter


def serves(config: KernelConfig, problem: Problem) -> str | None:
    """Return why a valid configuration does not serve a problem, as a clause; None if it does."""
    if isinstance(problem, ConvProblem):
        if config.operation != problem.operation:
            return f"it computes {config.operation}, not {problem.operation}"
        return (
            _unsuited(config, problem)
            or _conv_unfit(config, problem)
            or _conv_misaligned(config, problem)
        )
    if config.operation != "gemm":
        return f"it computes a convolution ({config.operation})"
    return (
        _unsuited(config, problem)
        or _gemm_misplaced(config, problem)
        or _gemm_misaligned(config, problem)
    )


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
        return (
            f"it reads {config.a_major}-major a and {config.b_major}-major b, not "
            f"{problem.a_major}-major a and {problem.b_major}-major b"
        )
    return None


def _gemm_misaligned(config: KernelConfig, problem: GemmProblem) -> str | None:
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    if not all(1 <= size <= _LARGEST for size in sizes.values()):
        return f"sizes must be from 1 to {_LARGEST}"
    longest = codegen.LARGEST_K.get(problem.a, problem.k)
    if problem.k > longest:
        return f"k = {problem.k} is above {longest}: sums may overflow 32 bits"
    multiples = (
        ({"row": "k", "column": "m"}[config.a_major], config.alignment),
        ({"row": "n", "column": "k"}[config.b_major], config.alignment),
        ("n", config.out_alignment),
    )
    for name, multiple in multiples:
        if sizes[name] % multiple:
            return f"{name} = {sizes[name]} is not a multiple of {multiple}"
    if not codegen.gemm_on_hopper(config) and -(-problem.n // config.tile[1]) > _ACROSS:
        return f"n = {problem.n} has more than {_ACROSS} tiles of {config.tile[1]}"
    return None


def _conv_unfit(config: KernelConfig, problem: ConvProblem) -> str | None:
    if problem.a_scale == "channel" or (
        problem.b_scale == "channel" and problem.operation != "fprop"
    ):
        return "scales that vary along the reduction, or per pixel, cannot be applied to its result"
    positive = (problem.n, problem.h, problem.w, problem.c, problem.k, problem.r, problem.s)
    if min(*positive, *problem.stride, *problem.dilation) < 1 or min(problem.padding) < 0:
        return "sizes, strides and dilations must be at least 1, paddings at least 0"
    if min(problem.p, problem.q) < 1:
        return "the filter is larger than the image"
    strided = problem.stride != (1, 1)
    if problem.operation == "dgrad" and strided != config.strided:
        return f"it supports only {'strided' if config.strided else 'unit'} strides"
    if problem.operation == "dgrad" and strided and problem.dilation != (1, 1):
        return "input gradients of convolutions with both stride and dilation are not supported"
    reach = [
        dilation * (size - 1)
        for dilation, size in zip(problem.dilation, (problem.r, problem.s), strict=True)
    ]
    if codegen.conv_on_hopper(config):
        if max(*reach, *problem.padding) > _CORNER:
            return f"TMA reaches at most {_CORNER} pixels beyond an image"
        if max(problem.stride) > 8:
            return "TMA supports strides up to 8"
    elif max(problem.r, problem.s) > _FILTER:
        return f"filters must have at most {_FILTER} rows and columns"
    return None


def _conv_misaligned(config: KernelConfig, problem: ConvProblem) -> str | None:
    last = {"fprop": "k", "dgrad": "c", "wgrad": "c"}[problem.operation]
    multiples = [("c", config.alignment), (last, config.out_alignment)]
    if problem.operation != "fprop":
        multiples.append(("k", config.alignment))
    for name, multiple in multiples:
        if (size := getattr(problem, name)) % multiple:
            return f"{name} = {size} is not a multiple of {multiple}"
    x = problem.n * problem.h * problem.w * problem.c
    weight = problem.k * problem.r * problem.s * problem.c
    y = problem.n * problem.p * problem.q * problem.k
    a, b, d = {"fprop": (x, weight, y), "dgrad": (y, weight, x), "wgrad": (y, x, weight)}[
        problem.operation
    ]
    # Sums of convolutions with 16-bit results are staged as FP32, and CUTLASS checks that size.
    if max(a * size_of(config.a), b * size_of(config.b), 4 * d) >= _BYTES:
        return "a tensor has 2 GiB or more (of a result, counted as FP32)"
    columns = {"fprop": problem.k, "dgrad": problem.c, "wgrad": problem.r * problem.s * problem.c}[
        problem.operation
    ]
    if -(-columns // config.tile[1]) > _ACROSS:
        return f"the result has more than {_ACROSS} tiles of {config.tile[1]} columns"
    return None


ENOUGH_WORK: Final = 2048**3
"""Multiply-adds from which an unmeasured product in a narrow format counts as faster than BF16.

Launches and casts are a fixed cost that dominates small products.
"""

NARROWEST: Final = 512
"""Smallest size of such a product; with a smaller one it would be bandwidth-bound."""

Candidates = Callable[[Problem, Arch], Sequence[KernelConfig]]


@dataclass(frozen=True)
class KernelDecision:
    """Decision for one problem.

    Attributes:
        config: the kernel; None for torch.
        taken: the problem that the kernel runs, padded or re-laid-out; equal to the original if
            that is not necessary.
        reason: one clause, for reports.
        integers: whether torch multiplies INT8 as integers; otherwise in BF16, which represents the
            values exactly.
    """

    config: KernelConfig | None
    taken: Problem
    reason: str
    integers: bool = True


@dataclass(frozen=True)
class DispatchPath:
    """Form of a problem that kernels accept, and the kernels that serve it."""

    taken: Problem
    configs: tuple[KernelConfig, ...]


def decide(
    problem: Problem,
    arch: Arch,
    table: TuningTable | None = None,
    candidates: Candidates | None = None,
) -> KernelDecision:
    """Decide for one problem.

    Args:
        arch: of the device.
        table: its tuning table; None if there is none.
        candidates: kernels to choose from; by default `selection.candidates.candidates`.
    """
    result = way(problem, arch, candidates or known)
    if isinstance(result, str):
        return _torch(problem, result)
    if table is not None and (choice := table.choice(problem)) is not None:
        return _tuned(problem, arch, result, choice)
    return _untuned(problem, arch, result)


def way(problem: Problem, arch: Arch, candidates: Candidates) -> DispatchPath | str:
    """Return the form of a problem that has kernels, or the reason why there is none.

    Forms with fewer copies come first.
    """
    copies_cost_more = False
    for used in padding.alternatives(problem):
        configs = tuple(candidates(used, arch))
        if configs and padding.pays(problem, used):
            return DispatchPath(used, configs)
        copies_cost_more = copies_cost_more or bool(configs)
    if copies_cost_more:
        copied = padding.filled(problem) == problem
        change = "copying its operands" if copied else "padding its sizes"
        return f"{change} for a kernel costs more than it gains"
    formats = problem.a if problem.a == problem.b else f"{problem.a} and {problem.b}"
    return f"{arch} has no kernel for this product of {formats}"


def known(problem: Problem, arch: Arch) -> tuple[KernelConfig, ...]:
    """Return the candidates that serve a problem."""
    from qsync_fx.backend.cuda.selection.candidates import candidates

    return candidates(problem, arch)


def _torch(problem: Problem, reason: str, integers: bool = True) -> KernelDecision:
    return KernelDecision(None, problem, reason, integers)


def _kernel(
    problem: Problem, result: DispatchPath, config: KernelConfig, reason: str
) -> KernelDecision:
    if result.taken != problem:
        reason += ", with copied operands"
    return KernelDecision(config, result.taken, reason)


def _tuned(
    problem: Problem, arch: Arch, result: DispatchPath, choice: TunedChoice
) -> KernelDecision:
    if choice.faster_than_bf16 is False:
        return _torch(
            problem,
            f"{problem.a} was measured to be no faster than {wide(arch)} on this device",
            integers=False,
        )
    if choice.name == "torch":
        return _torch(problem, "torch was measured to be at least as fast")
    for config in result.configs:
        if config.name == choice.name:
            return _kernel(problem, result, config, "tuned")
    # The chosen kernel is gone, or does not serve this exact size: use the next best candidate.
    left = sorted(
        (config for config in result.configs if config.name in choice.seconds),
        key=lambda c: choice.seconds[c.name],
    )
    torch_takes = choice.seconds.get("torch", float("inf"))
    if left and choice.seconds[left[0].name] < torch_takes:
        return _kernel(problem, result, left[0], "tuned")
    return _torch(problem, "the tuned kernel does not support this size")


def _untuned(problem: Problem, arch: Arch, result: DispatchPath) -> KernelDecision:
    first = result.configs[0]
    narrow = problem.a in NARROW or problem.b in NARROW
    if not narrow and "tf32" not in (problem.a, problem.b):
        return _torch(problem, "without tuning, torch is assumed to be as fast")
    if not narrow:
        return _kernel(problem, result, first, "not tuned")
    if arch == "sm_75":
        return _kernel(problem, result, first, f"not tuned; {arch} has no unit for bf16")
    m, n, k = work(problem)
    if m * n * k >= ENOUGH_WORK and min(m, n, k) >= NARROWEST:
        return _kernel(problem, result, first, "not tuned")
    return _torch(
        problem,
        f"{m} x {n} x {k} is assumed to be too small for {problem.a} to be faster (not tuned)",
        integers=False,
    )
