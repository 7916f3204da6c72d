"""Candidate kernels of a problem: built-in tables, and configurations that users add.

    from qsync_fx.backend.cuda.selection import candidates
    candidates.add(dataclasses.replace(candidates.candidates(problem, "sm_80")[0], stages=5))

`of_all` and `of_problems` list the kernels to compile ahead of time for machines without a
compiler; the latter covers every kernel that the problems of a planned model require.

Invariant: every returned configuration is valid (`problems`) and serves its problem. Equal calls
return equal results in the same order until a user adds a configuration. No function queries a
device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qsync_fx.backend.cuda.codegen import QUANTIZER_FORMATS, X_TYPES, TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, MULTIPROCESSORS, Arch, KernelConfig
from qsync_fx.backend.cuda.problem.problem import ConvProblem, Problem
from qsync_fx.backend.cuda.selection import constraints, select
from qsync_fx.backend.cuda.selection.candidate_tables import (
    conv_candidates,
    conv_configs,
    gemm_candidates,
    gemm_configs,
)
from qsync_fx.backend.cuda.selection.select import decide, known, way
from qsync_fx.errors import OptionError, nearest


def problems(config: KernelConfig) -> list[str]:
    """Return the sentences of the rules that a configuration breaks; none if it is valid."""
    return [rule.sentence for rule in constraints.tables_of(config).broken(config)]


_ADDED: Final[dict[str, KernelConfig]] = {}
"""Configurations added by users, by name, for all models of the process."""


def candidates(
    problem: Problem, arch: Arch, multiprocessors: int | None = None
) -> tuple[KernelConfig, ...]:
    """Return the kernels for a problem: the best general one first, kernels of users last.

    Args:
        multiprocessors: of the device; by default the number of a typical device.

    Raises:
        OptionError: no such architecture.
    """
    _known(arch)
    owned = (
        conv_candidates(problem, arch)
        if isinstance(problem, ConvProblem)
        else gemm_candidates(problem, arch, multiprocessors or MULTIPROCESSORS[arch])
    )
    users = (
        config
        for config in _ADDED.values()
        if config.arch == arch and select.serves(config, problem) is None
    )
    return tuple(dict.fromkeys((*owned, *users)))


def all_configs(arch: Arch) -> tuple[KernelConfig, ...]:
    """Return every configuration that is compiled ahead or checked for an architecture, each once.

    Raises:
        OptionError: no such architecture.
    """
    _known(arch)
    users = (config for config in _ADDED.values() if config.arch == arch)
    return tuple(dict.fromkeys((*gemm_configs(arch), *conv_configs(arch), *users)))


def add(config: KernelConfig) -> KernelConfig:
    """Add a kernel as a candidate for every problem that it serves, in this process; idempotent.

    Raises:
        OptionError: it breaks rules; all of them are listed.
    """
    wrong = problems(config)
    if wrong:
        raise OptionError(
            "the kernel configuration is invalid: " + "; ".join(wrong),
            where=config.name if isinstance(config.tile, tuple) else repr(config),
            do="change it, or start from one of `candidates(problem, arch)`",
        )
    return _ADDED.setdefault(config.name, config)


def remove(config: KernelConfig) -> None:
    """Undo `add`; ignore configurations that were not added."""
    _ADDED.pop(config.name, None)


def _known(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise OptionError(
            f"there are no kernels for the architecture {arch!r}",
            do=nearest(str(arch), ARCHITECTURES),
        )


def of_all(arch: Arch) -> list[TranslationUnit]:
    """Return one kernel per operation, formats and layout, and all quantizers and converters."""
    first: dict[tuple[object, ...], KernelConfig] = {}
    for config in all_configs(arch):
        first.setdefault(
            (config.operation, config.a, config.b, config.out, config.a_major, config.b_major),
            config,
        )
    products = map(kernel_registry.unit_of, first.values())
    return [
        *products,
        *_quantizers(arch, X_TYPES, QUANTIZER_FORMATS),
        kernel_registry.copier(arch),
        *kernel_registry.converters(arch),
    ]


def of_problems(
    problems: Iterable[Problem], arch: Arch, every_candidate: bool
) -> list[TranslationUnit]:
    """Return the units for these problems: kernels, quantizers of their formats, copy kernels.

    Args:
        every_candidate: whether to include all kernels that the tuner may choose, or only the
            kernels that run without tuning.
    """
    configs: dict[KernelConfig, None] = {}
    formats: dict[str, None] = {}
    # Weights are FP32; activations and gradients are FP32 or the output format of another product.
    read = {"fp32": None}
    for problem in problems:
        formats |= dict.fromkeys((problem.a, problem.b))
        read[problem.out] = None
        if every_candidate:
            result = way(problem, arch, known)
            configs |= dict.fromkeys(() if isinstance(result, str) else result.configs)
        elif (config := decide(problem, arch).config) is not None:
            configs[config] = None
    # A copy may depend on pointer alignment, which is not part of a problem.
    copiers = [kernel_registry.copier(arch)] if configs else []
    return [*map(kernel_registry.unit_of, configs), *_quantizers(arch, read, formats), *copiers]


def _quantizers(arch: Arch, read: Iterable[str], formats: Iterable[str]) -> list[TranslationUnit]:
    return [
        kernel_registry.quantizer(arch, x, fmt)
        for fmt in formats
        if fmt in QUANTIZER_FORMATS
        for x in read
        if x in X_TYPES
    ]
