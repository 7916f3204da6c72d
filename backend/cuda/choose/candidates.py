"""The kernels that are tried: ours by tables, and those that users add.

    from qsync_fx.backend.cuda.choose import candidates
    candidates.add(dataclasses.replace(candidates.candidates(problem, "sm_80")[0], stages=5))

Invariant: every configuration returned here is valid (`rules.problems`) and serves the problem it is returned for; equal questions have
equal answers, in the same order, until a user adds one.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.choose import rules, serving
from qsync_fx.backend.cuda.choose.candidates_conv import conv_candidates, conv_configs
from qsync_fx.backend.cuda.choose.candidates_gemm import gemm_candidates, gemm_configs
from qsync_fx.backend.cuda.kernel.config import ARCHITECTURES, Arch, KernelConfig
from qsync_fx.backend.cuda.kernel.hardware import MULTIPROCESSORS
from qsync_fx.backend.cuda.problem import ConvProblem, Problem
from qsync_fx.errors import OptionError, nearest

_ADDED: Final[dict[str, KernelConfig]] = {}
"""What users added, by name. Kernels are of the process, as operators are: every model that is compiled in it may use them."""


def candidates(problem: Problem, arch: Arch, multiprocessors: int | None = None) -> tuple[KernelConfig, ...]:
    """Returns the kernels for a problem, the best general one first, those of users last; none where nothing serves it.

    Args:
        multiprocessors: how many the device has, if it is known; by default those of the usual one of an architecture.

    Raises:
        OptionError: no such architecture.
    """
    _known(arch)
    own = (
        conv_candidates(problem, arch)
        if isinstance(problem, ConvProblem)
        else gemm_candidates(problem, arch, multiprocessors or MULTIPROCESSORS[arch])
    )
    users = (config for config in _ADDED.values() if config.arch == arch and serving.serves(config, problem) is None)
    return tuple(dict.fromkeys((*own, *users)))


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
    wrong = rules.problems(config)
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
            f"{arch!r} is no architecture that there are kernels for", do=nearest(str(arch), ARCHITECTURES)
        )
