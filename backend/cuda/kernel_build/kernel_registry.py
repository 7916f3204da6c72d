"""From configurations to libraries that can be called.

Invariant: a kernel that could not be had once is not asked for again in this process: the same call takes the same way every time, and a
compiler that fails does so once, not at every step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.errors import KernelError, QSyncError, RefusedKernelError, ToolchainError

_lock: Final = threading.Lock()
_had: Final[dict[TranslationUnit, Library | QSyncError]] = {}
_refused: Final[set[TranslationUnit]] = set()
_prepared = False


def unit_of(config: KernelConfig) -> TranslationUnit:
    """Returns what is compiled for a configuration."""
    return _source(config)


@functools.lru_cache(maxsize=1024)
def _source(config: KernelConfig) -> TranslationUnit:
    if config.operation == "gemm":
        from qsync_fx.backend.cuda import codegen

        return codegen.gemm_source(config)
    from qsync_fx.backend.cuda import codegen

    return codegen.conv_source(config)


@functools.lru_cache(maxsize=64)
def quantizer(arch: Arch, x: str, fmt: str) -> TranslationUnit:
    """Returns the quantizer of an architecture that reads values in the format `x` and writes `fmt`."""
    from qsync_fx.backend.cuda import codegen

    return codegen.quantizer(arch, x, fmt)


def copiers(arch: Arch) -> list[TranslationUnit]:
    """Returns what copies operands on an architecture, if anything does: what compiles for sm_70 takes products alone."""
    return [] if arch == "sm_70" else [copier(arch)]


@functools.lru_cache(maxsize=64)
def copier(arch: Arch) -> TranslationUnit:
    """Returns what copies matrices as they are on an architecture."""
    from qsync_fx.backend.cuda import codegen

    return codegen.copier(arch)


@functools.lru_cache(maxsize=64)
def converter(arch: Arch, x: str) -> TranslationUnit:
    """Returns what converts numbers in the format `x` to floats on an architecture."""
    from qsync_fx.backend.cuda import codegen

    return codegen.converter(arch, x)


def converters(arch: Arch) -> list[TranslationUnit]:
    """Returns all that converts numbers on an architecture; see `copiers`."""
    from qsync_fx.backend.cuda.codegen import NUMBERS

    return [] if arch == "sm_70" else [converter(arch, x) for x in NUMBERS]


def library(unit: TranslationUnit, *, wait: bool = True) -> Library | None:
    """Returns the library of a unit, and compiles it where it is not in the cache.

    Args:
        wait: False where nothing may be read or compiled now, as while a CUDA graph is captured; None is returned where that would be
            needed.

    Raises:
        QSyncError: it cannot be compiled or loaded, now or the first time it was asked for, or was switched off.
    """
    result = _had.get(unit)
    if result is None:
        if not wait:
            return None
        prepare([unit])
        result = _had[unit]
    if isinstance(result, QSyncError):
        raise result
    return result


def loaded(unit: TranslationUnit) -> bool:
    """Whether a unit's library is loaded and may be used."""
    return isinstance(_had.get(unit), Library)


def stored(unit: TranslationUnit) -> bool:
    """Whether a unit's library is in the cache or among kernels built ahead of time, so that nothing has to be compiled for it."""
    return loaded(unit) or (unit not in _had and _stored(unit))


@functools.lru_cache(maxsize=1024)
def _stored(unit: TranslationUnit) -> bool:
    from qsync_fx.backend.cuda.kernel_build import compiler

    try:
        return unit in compiler.attempt([unit], progress=False, compiling=False).libraries
    except QSyncError:
        return False


def failure(unit: TranslationUnit) -> QSyncError | None:
    """Returns why a unit's library could not be had when it was asked for; None where it could, or nobody has asked."""
    result = _had.get(unit)
    return result if isinstance(result, QSyncError) else None


def refused(unit: TranslationUnit) -> bool:
    """Whether another kernel is to be tried in place of this one: its compiler was refused for it, or it failed to start.

    What was refused stands in the cache under the versions of its compilers, so the next process does not compile it to find out.
    """
    return unit in _refused


def refusals() -> int:
    """Returns a number that changes with what is `refused`."""
    return len(_refused)


def switch_off(unit: TranslationUnit, error: QSyncError) -> None:
    """Lets a unit's library not be used any more in this process."""
    with _lock:
        _had[unit] = error
        _refused.add(unit)


def compiles_late() -> bool:
    """Whether a product that was not prepared may be compiled when it is called: not once a graph was, whose steps would stand still."""
    return not _prepared


def prepare_graph(units: Iterable[TranslationUnit]) -> Sequence[QSyncError]:
    """Does what `prepare` does, for a graph that is about to run; from then on no call waits for a product to be compiled."""
    global _prepared
    failed = prepare(units)
    _prepared = True
    return failed


def prepare(units: Iterable[TranslationUnit]) -> Sequence[QSyncError]:
    """Compiles what is not in the cache, side by side, and loads it all; returns what failed, which torch will compute."""
    from qsync_fx.backend.cuda.kernel_build import compiler
    from qsync_fx.backend.cuda.kernel_build.library import load

    with _lock:
        missing = [unit for unit in dict.fromkeys(units) if unit not in _had]
        if missing:
            try:
                built = compiler.attempt(missing)
            except QSyncError as error:
                _had.update(dict.fromkeys(missing, error))
                return [error]
            for unit in missing:
                try:
                    failed = built.failures.get(unit)
                    _had[unit] = failed if failed is not None else load(built.libraries[unit], unit)
                except KernelError as error:
                    _had[unit] = error
            _refused.update(unit for unit in missing if _of_this_kernel(_had[unit]))
        return [had for unit in missing if isinstance(had := _had[unit], QSyncError)]


def _of_this_kernel(had: Library | QSyncError) -> bool:
    """Whether a failure is one of this kernel, where another one might do, and not one of the machine."""
    return isinstance(had, RefusedKernelError) or (
        isinstance(had, ToolchainError) and had.of_the_source
    )
