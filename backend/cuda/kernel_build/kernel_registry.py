"""Registry of the kernel libraries of this process.

Invariant: a failure is final in this process. The same call therefore always runs the same way, and
a compiler fails once rather than at every step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.errors import KernelError, QSyncError, RefusedKernelError, ToolchainError

_lock: Final = threading.Lock()
_had: Final[dict[TranslationUnit, Library | QSyncError]] = {}
_refused: Final[set[TranslationUnit]] = set()
_prepared = False


def library(unit: TranslationUnit, *, wait: bool = True) -> Library | None:
    """Return the library of a unit; compile it if it is not in the cache.

    Without `wait`, as during CUDA graph capture, return None if a file would have to be read or
    compiled. Raise `QSyncError` if it could not be compiled or loaded, or was switched off.
    """
    if unit not in _had:
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
    """Return whether another kernel should replace this one: refused, or failed to launch."""
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
    """Return whether GEMMs may be compiled when they are called, since no graph was prepared."""
    return not _prepared


def prepare_graph(units: Iterable[TranslationUnit]) -> Sequence[QSyncError]:
    """Prepare units for a graph; from now on no GEMM or convolution is compiled by its call."""
    global _prepared
    failed = prepare(units)
    _prepared = True
    return failed


def prepare(units: Iterable[TranslationUnit]) -> Sequence[QSyncError]:
    """Compile the missing units in parallel and load all; return the failures."""
    from qsync_fx.backend.cuda.kernel_build import compiler
    from qsync_fx.backend.cuda.kernel_build.library import load

    with _lock:
        missing = [unit for unit in dict.fromkeys(units) if unit not in _had]
        if not missing:
            return []
        try:
            built = compiler.attempt(missing)
        except QSyncError as error:
            _had.update(dict.fromkeys(missing, error))
            return [error]
        for unit in missing:
            try:
                _had[unit] = built.failures.get(unit) or load(built.libraries[unit], unit)
            except KernelError as error:
                _had[unit] = error
        failed = {unit: had for unit in missing if isinstance(had := _had[unit], QSyncError)}
        for unit, reason in failed.items():
            of_source = isinstance(reason, ToolchainError) and reason.of_the_source
            # Another kernel might work.
            if of_source or isinstance(reason, RefusedKernelError):
                _refused.add(unit)
        return list(failed.values())
