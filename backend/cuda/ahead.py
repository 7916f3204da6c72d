"""Which kernels to compile before they are needed, for machines that have no compiler.

Invariant: for a model, these are the kernels that the device will ask for when it runs the model with this plan, so that nothing has to be
compiled there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qsync_fx.backend.cuda import candidates, kernels, quantizer_source
from qsync_fx.backend.cuda.config import Arch, KernelConfig
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.select import decide, known, way
from qsync_fx.backend.cuda.unit import Unit

_INPUTS: Final = tuple(quantizer_source.X_TYPES)


def of_all(arch: Arch) -> list[Unit]:
    """Returns the first candidate for each product, pair of formats and layout, and all quantizers."""
    first: dict[tuple[object, ...], KernelConfig] = {}
    for config in candidates.all_configs(arch):
        if config.activation == "none":
            first.setdefault((config.operation, config.a, config.b, config.out, config.a_major, config.b_major), config)
    return [*map(kernels.unit_of, first.values()), *_quantizers(arch, quantizer_source.FORMATS)]


def of_problems(problems: Iterable[Problem], arch: Arch, every_candidate: bool) -> list[Unit]:
    """Returns what computes these problems, and the quantizers of their formats.

    Args:
        every_candidate: all kernels that the tuner may choose from; otherwise those that run where nothing was tuned.
    """
    configs: dict[KernelConfig, None] = {}
    formats: dict[str, None] = {}
    for problem in problems:
        formats |= dict.fromkeys((problem.a, problem.b))
        if every_candidate:
            found = way(problem, arch, known)
            configs |= dict.fromkeys(() if isinstance(found, str) else found.configs)
        elif (config := decide(problem, arch).config) is not None:
            configs[config] = None
    return [*map(kernels.unit_of, configs), *_quantizers(arch, formats)]


def _quantizers(arch: Arch, formats: Iterable[str]) -> list[Unit]:
    return [
        quantizer_source.quantizer(arch, x, fmt) for fmt in formats if fmt in quantizer_source.FORMATS for x in _INPUTS
    ]
