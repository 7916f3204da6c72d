"""Which kernels to compile before they are needed, for machines that have no compiler.

Invariant: for a model, these are the kernels that the device will ask for when it runs the model with this plan, so that nothing has to be
compiled there.
"""

from __future__ import annotations

from collections.abc import Iterable

from qsync_fx.backend.cuda.choose import candidates
from qsync_fx.backend.cuda.choose.select import decide, known, way
from qsync_fx.backend.cuda.kernel.config import Arch, KernelConfig
from qsync_fx.backend.cuda.libraries import kernels
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.source.quantizer_source import FORMATS, X_TYPES
from qsync_fx.backend.cuda.source.unit import Unit


def of_all(arch: Arch) -> list[Unit]:
    """Returns the first candidate for each product, pair of formats and layout, all quantizers, and all that copies and converts."""
    first: dict[tuple[object, ...], KernelConfig] = {}
    for config in candidates.all_configs(arch):
        first.setdefault((config.operation, config.a, config.b, config.out, config.a_major, config.b_major), config)
    products = map(kernels.unit_of, first.values())
    return [*products, *_quantizers(arch, X_TYPES, FORMATS), *kernels.copiers(arch), *kernels.converters(arch)]


def of_problems(problems: Iterable[Problem], arch: Arch, every_candidate: bool) -> list[Unit]:
    """Returns what computes these problems, the quantizers of their formats, and what copies operands that lie otherwise.

    Args:
        every_candidate: all kernels that the tuner may choose from; otherwise those that run where nothing was tuned.
    """
    configs: dict[KernelConfig, None] = {}
    formats: dict[str, None] = {}
    # Weights are FP32; activations and gradients are that, or what another product gives out.
    read = {"fp32": None}
    for problem in problems:
        formats |= dict.fromkeys((problem.a, problem.b))
        read[problem.out] = None
        if every_candidate:
            found = way(problem, arch, known)
            configs |= dict.fromkeys(() if isinstance(found, str) else found.configs)
        elif (config := decide(problem, arch).config) is not None:
            configs[config] = None
    # Whether an operand has to be copied may depend on where its memory starts, which no problem says.
    copiers = kernels.copiers(arch) if configs else []
    return [*map(kernels.unit_of, configs), *_quantizers(arch, read, formats), *copiers]


def _quantizers(arch: Arch, read: Iterable[str], formats: Iterable[str]) -> list[Unit]:
    # What compiles for it takes products alone.
    if arch == "sm_70":
        return []
    return [kernels.quantizer(arch, x, fmt) for fmt in formats if fmt in FORMATS for x in read if x in X_TYPES]
