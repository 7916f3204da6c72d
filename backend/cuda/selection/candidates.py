"""The kernels that are tried: ours by tables, and those that users add.

    from qsync_fx.backend.cuda.selection import candidates
    candidates.add(dataclasses.replace(candidates.candidates(problem, "sm_80")[0], stages=5))

Invariant: every configuration returned here is valid (`rules.problems`) and serves the problem it is returned for; equal questions have
equal answers, in the same order, until a user adds one.

Which configurations are kernels: the rules of a configuration's operation. Which problems those serve is in `serving`.

Invariant: nothing here looks at a device.

Which kernels to compile before they are needed, for machines that have no compiler.

Invariant: for a model, these are the kernels that the device will ask for when it runs the model with this plan, so that nothing has to be
compiled there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from qsync_fx.backend.cuda.codegen import QUANTIZER_FORMATS, X_TYPES, TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, MULTIPROCESSORS, Arch, KernelConfig
from qsync_fx.backend.cuda.problem.problem import ConvOperation, ConvProblem, Problem
from qsync_fx.backend.cuda.selection import constraints_conv, constraints_gemm, select
from qsync_fx.backend.cuda.selection.candidates_conv import conv_candidates, conv_configs
from qsync_fx.backend.cuda.selection.candidates_gemm import gemm_candidates, gemm_configs
from qsync_fx.backend.cuda.selection.select import decide, known, way
from qsync_fx.errors import OptionError, nearest


def problems(config: KernelConfig) -> list[str]:
    """Returns the sentences of the rules that a configuration breaks; none if it is valid."""
    table = constraints_conv if config.operation in get_args(ConvOperation) else constraints_gemm
    return [rule.sentence for rule in table.broken(config)]


_ADDED: Final[dict[str, KernelConfig]] = {}
"""What users added, by name. Kernels are of the process, as operators are: every model that is compiled in it may use them."""


def candidates(
    problem: Problem, arch: Arch, multiprocessors: int | None = None
) -> tuple[KernelConfig, ...]:
    """Returns the kernels for a problem, the best general one first, those of users last; none where nothing serves it.

    Args:
        multiprocessors: how many the device has, if it is known; by default those of the usual one of an architecture.

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
    """Returns every configuration that is compiled ahead or checked for an architecture; each once.

    Raises:
        OptionError: no such architecture.
    """
    _known(arch)
    users = (config for config in _ADDED.values() if config.arch == arch)
    return tuple(dict.fromkeys((*gemm_configs(arch), *conv_configs(arch), *users)))


def add(config: KernelConfig) -> KernelConfig:
    """Makes a kernel a candidate for every problem that it serves, from now on and in this process. Adding it again changes nothing.

    Raises:
        OptionError: it breaks rules; all of them are listed.
    """
    wrong = problems(config)
    if wrong:
        raise OptionError(
            "the configuration is no kernel: " + "; ".join(wrong),
            where=config.name if isinstance(config.tile, tuple) else repr(config),
            do="change it, or start from one of `candidates(problem, arch)`",
        )
    return _ADDED.setdefault(config.name, config)


def remove(config: KernelConfig) -> None:
    """Takes back what `add` did; does nothing for configurations that were not added."""
    _ADDED.pop(config.name, None)


def _known(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise OptionError(
            f"{arch!r} is no architecture that there are kernels for",
            do=nearest(str(arch), ARCHITECTURES),
        )


def of_all(arch: Arch) -> list[TranslationUnit]:
    """Returns the first candidate for each product, pair of formats and layout, all quantizers, and all that copies and converts."""
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
        *kernel_registry.copiers(arch),
        *kernel_registry.converters(arch),
    ]


def of_problems(
    problems: Iterable[Problem], arch: Arch, every_candidate: bool
) -> list[TranslationUnit]:
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
            result = way(problem, arch, known)
            configs |= dict.fromkeys(() if isinstance(result, str) else result.configs)
        elif (config := decide(problem, arch).config) is not None:
            configs[config] = None
    # Whether an operand has to be copied may depend on where its memory starts, which no problem says.
    copiers = kernel_registry.copiers(arch) if configs else []
    return [*map(kernel_registry.unit_of, configs), *_quantizers(arch, read, formats), *copiers]


def _quantizers(arch: Arch, read: Iterable[str], formats: Iterable[str]) -> list[TranslationUnit]:
    # What compiles for it takes products alone.
    if arch == "sm_70":
        return []
    return [
        kernel_registry.quantizer(arch, x, fmt)
        for fmt in formats
        if fmt in QUANTIZER_FORMATS
        for x in read
        if x in X_TYPES
    ]
