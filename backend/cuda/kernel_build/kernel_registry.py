"""Registry of the kernel libraries of this process.

Invariant: a failure is final in this process. The same call therefore always runs the same way, and
a compiler fails once rather than at every step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.errors import KernelError, QSyncError, RefusedKernelError, ToolchainError

_lock: Final = threading.Lock()
_had: Final[dict[TranslationUnit, Library | QSyncError]] = {}
_refused: Final[set[TranslationUnit]] = set()
_prepared = False


@functools.lru_cache(maxsize=1024)
def unit_of(config: KernelConfig) -> TranslationUnit:
    """Return the translation unit of a configuration."""
    if config.operation == "gemm":
        return codegen.gemm_source(config)
    return codegen.conv_source(config)


@functools.lru_cache(maxsize=64)
def quantizer(arch: Arch, x: str, fmt: str) -> TranslationUnit:
    """Return the quantizer unit of an architecture, from values in the format `x` to `fmt`."""
    return codegen.quantizer(arch, x, fmt)


@functools.lru_cache(maxsize=64)
def copier(arch: Arch) -> TranslationUnit:
    """Return the unit that copies matrices without conversion."""
    return codegen.copier(arch)


@functools.lru_cache(maxsize=64)
def converter(arch: Arch, x: str) -> TranslationUnit:
    """Return the unit that converts numbers in the format `x` to floats."""
    return codegen.converter(arch, x)


def converters(arch: Arch) -> list[TranslationUnit]:
    """Return all units that convert numbers on an architecture."""
    return [converter(arch, x) for x in codegen.NUMBERS]


def library(unit: TranslationUnit, *, wait: bool = True) -> Library | None:
    """Return the library of a unit; compile it if it is not in the cache.

    Args:
        wait: False if no file may be read or compiled now, such as during CUDA graph capture; None
            is returned if that is necessary.

    Raises:
        QSyncError: it cannot be compiled or loaded, now or on the first request, or was switched
            off.
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
    """Return whether a unit's library is loaded and usable."""
    return isinstance(_had.get(unit), Library)


def stored(unit: TranslationUnit) -> bool:
    """Return whether a unit's library is available without compilation."""
    return loaded(unit) or (unit not in _had and _stored(unit))


@functools.lru_cache(maxsize=1024)
def _stored(unit: TranslationUnit) -> bool:
    from qsync_fx.backend.cuda.kernel_build import compiler

    try:
        return unit in compiler.attempt([unit], progress=False, compiling=False).libraries
    except QSyncError:
        return False


def failure(unit: TranslationUnit) -> QSyncError | None:
    """Return the error of a unit's failed request; None if it succeeded or there was none."""
    result = _had.get(unit)
    return result if isinstance(result, QSyncError) else None


def refused(unit: TranslationUnit) -> bool:
    """Return whether another kernel should replace this one.

    This is so if its source was refused, or if it could not be launched. The cache records refusals
    under the compiler versions, so the next process does not compile the unit again.
    """
    return unit in _refused


def refusals() -> int:
    """Return a number that changes with the set of refused units."""
    return len(_refused)


def switch_off(unit: TranslationUnit, error: QSyncError) -> None:
    """Disable a unit's library in this process, with the reason."""
    with _lock:
        _had[unit] = error
        _refused.add(unit)


def compiles_late() -> bool:
    """Return whether an unprepared GEMM or convolution may be compiled when it is called.

    It may not after a graph was prepared, since its steps would wait for the compiler.
    """
    return not _prepared


def prepare_graph(units: Iterable[TranslationUnit]) -> Sequence[QSyncError]:
    """Prepare units for a graph that is about to run.

    From now on, no call waits for the compilation of a GEMM or convolution (`compiles_late`).
    """
    global _prepared
    failed = prepare(units)
    _prepared = True
    return failed


def prepare(units: Iterable[TranslationUnit]) -> Sequence[QSyncError]:
    """Compile the missing units in parallel and load all; return the failures.

    torch computes for failed units.
    """
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
    """Return whether a failure is specific to this kernel, so that another kernel might work."""
    return isinstance(had, RefusedKernelError) or (
        isinstance(had, ToolchainError) and had.of_the_source
    )
