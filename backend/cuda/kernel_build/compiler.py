"""Libraries of translation units: from the cache, or compiled by `jobs`.

Invariant: a returned path is a library that was compiled from exactly this unit and that passed the
checks of `sass`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import jobs as budget, kernel_cache
from qsync_fx.backend.cuda.kernel_build.jobs import Todo, compile_units
from qsync_fx.backend.cuda.kernel_build.kernel_cache import CacheEntry, content_key, tools_key
from qsync_fx.backend.cuda.toolchain import toolchain
from qsync_fx.errors import KernelError, RefusedKernelError, ToolchainError


@dataclass(frozen=True)
class Built:
    """Result of a build: the library or the failure of each unit."""

    libraries: dict[TranslationUnit, Path]
    failures: dict[TranslationUnit, KernelError]


def build(
    units: Sequence[TranslationUnit],
    *,
    progress: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
) -> dict[TranslationUnit, Path]:
    """Return the library of each unit; compile those that are not in the cache.

    Args:
        progress: whether to report progress on standard error.
        jobs: limit of parallel compilers; see `jobs.jobs`.
        folder: cache to use instead of the user's; folders of kernels built ahead of time are then
            ignored.

    Raises:
        ToolchainError: a unit must be compiled, and a tool is missing, unsuitable or fails.
        KernelError: the cache cannot be used, or a library failed the checks. All other units have
            been compiled by then.
    """
    built = attempt(units, progress=progress, jobs=jobs, folder=folder)
    for error in built.failures.values():
        raise error
    return built.libraries


def attempt(
    units: Sequence[TranslationUnit],
    *,
    progress: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
    compiling: bool = True,
) -> Built:
    """Build units like `build`, but return failures; both results are in the order of `units`.

    Args:
        compiling: False makes a missing library a failure.
    """
    built = _attempt({unit: content_key(unit) for unit in units}, progress, jobs, folder, compiling)
    return Built(
        {unit: built.libraries[unit] for unit in units if unit in built.libraries},
        {unit: built.failures[unit] for unit in units if unit in built.failures},
    )


def _attempt(
    contents: dict[TranslationUnit, str],
    progress: bool,
    jobs: int | None,
    folder: Path | None,
    compiling: bool,
) -> Built:
    built = Built({}, {})
    elsewhere = [] if folder else kernel_cache.ahead_of_time()
    for unit, content in contents.items():
        for place in elsewhere:
            if unit not in built.libraries and (entry := kernel_cache.find(place, content, None)):
                built.libraries[unit] = entry.library
    missing = {unit: content for unit, content in contents.items() if unit not in built.libraries}
    if not missing:
        return built
    place = folder or kernel_cache.root()
    todo: list[Todo] = []
    for templates in (True, False):
        part = {unit: key for unit, key in missing.items() if unit.templates is templates}
        if part:
            todo += _not_cached(built, part, templates, place)
    if not compiling:
        for item in todo:
            built.failures[item.unit] = KernelError(
                "the kernel has not been compiled", where=item.unit.name
            )
    elif todo:
        kernel_cache.sweep(place)
        compile_units(todo, place, budget.jobs(jobs), progress, functools.partial(_take, built))
    return built


def _not_cached(
    built: Built, missing: dict[TranslationUnit, str], templates: bool, place: Path
) -> list[Todo]:
    """Collect the cached results of one toolchain; return the units that it must compile.

    Args:
        templates: whether the units need CUTLASS.
    """
    try:
        tools = toolchain(templates)
    except ToolchainError as error:
        for unit, content in missing.items():
            entry = (
                kernel_cache.find(kernel_cache.prepare(place), content, None)
                if place.is_dir()
                else None
            )
            _take(built, unit, entry or error)
        return []
    kernel_cache.prepare(place)
    key = tools_key(tools, budget.FLAGS_IN_KEY, place)
    for unit, content in missing.items():
        if entry := kernel_cache.find(place, content, key):
            _take(built, unit, entry)
    return [
        Todo(unit, content, tools, key)
        for unit, content in missing.items()
        if unit not in built.libraries and unit not in built.failures
    ]


def _take(built: Built, unit: TranslationUnit, result: CacheEntry | KernelError) -> None:
    if isinstance(result, KernelError):
        built.failures[unit] = result
    elif result.manifest.refused:
        built.failures[unit] = RefusedKernelError(
            f"the kernel must not be used: {result.manifest.refused}",
            where=unit.name,
            do="use another configuration; the refusal is cached until `qsync kernels clear`",
        )
    else:
        built.libraries[unit] = result.library
