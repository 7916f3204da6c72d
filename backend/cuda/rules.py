"""Which configurations are kernels, and which problems a kernel serves.

Invariant: nothing here looks at a device. Rules of validity are in `rules_gemm` and `rules_conv`; what is said of a problem is a clause
that reports show as it is.
"""

from __future__ import annotations

from typing import get_args

from qsync_fx.backend.cuda import rules_conv, rules_gemm
from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.gemm_source import LARGEST_K, hopper
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem, Problem


def problems(config: KernelConfig) -> list[str]:
    """Returns the sentences of the rules that a configuration breaks; none if it is valid."""
    if config.operation in get_args(ConvOperation):
        return rules_conv.problems(config)
    return [rule.sentence for rule in rules_gemm.broken(config)]


def serves(config: KernelConfig, problem: Problem) -> str | None:
    """Returns why a valid configuration does not serve a problem: a clause; None if it does."""
    if isinstance(problem, ConvProblem):
        return rules_conv.serves(config, problem)
    if config.operation != "gemm":
        return f"it computes a convolution ({config.operation})"
    return _unsuited(config, problem) or _misaligned(config, problem)


def _unsuited(config: KernelConfig, problem: GemmProblem) -> str | None:
    if (config.a, config.b) != (problem.a, problem.b):
        return f"it multiplies {config.a} by {config.b}, not {problem.a} by {problem.b}"
    if config.out != problem.out:
        return f"its output is {config.out}, not {problem.out}"
    if (config.a_major, config.b_major) != (problem.a_major, problem.b_major):
        return f"it takes a by {config.a_major}s and b by {config.b_major}s, not by {problem.a_major}s and {problem.b_major}s"
    if config.activation != problem.activation:
        return f"its activation is {config.activation}, not {problem.activation}"
    if config.a_scale == "none" and (problem.a_scale, problem.b_scale) != ("none", "none"):
        return "it reads no scales"
    if problem.bias and not config.bias:
        return "it adds no bias"
    return None


def _misaligned(config: KernelConfig, problem: GemmProblem) -> str | None:
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    if not all(1 <= size < 1 << 31 for size in sizes.values()):
        return "sizes are from 1 to 2147483647"
    if problem.k > LARGEST_K.get(problem.a, problem.k):
        return f"k = {problem.k} is above {LARGEST_K[problem.a]}: sums of products may leave 32 bits"
    multiples = (
        ("k" if config.a_major == "row" else "m", config.alignment),
        ("k" if config.b_major == "column" else "n", config.alignment),
        ("n", config.out_alignment),
    )
    for name, multiple in multiples:
        if sizes[name] % multiple:
            return f"{name} = {sizes[name]} is no multiple of {multiple}"
    if not hopper(config) and -(-problem.n // config.tile[1]) > 65535:
        return f"n = {problem.n} has more than 65535 tiles of {config.tile[1]}"
    return None
