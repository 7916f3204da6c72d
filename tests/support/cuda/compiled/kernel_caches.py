"""pytest plugin with kernel caches: a user's cache with one library, and a counter of nvcc calls.

Modules that use its fixtures name it in `pytest_plugins`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_cache
from qsync_fx.backend.cuda.toolchain import Toolchain
from qsync_fx.errors import ToolchainError
from tests.support.cuda.compiled.small_units import build, small_unit

UNIT = small_unit()

WRAPPER = """\
#!/bin/sh
case "$*" in *--version*|*--dryrun*) exec {real} "$@";; esac
echo run >> {calls}
{before}
exec {real} "$@"
"""


@functools.cache
def _tools() -> Toolchain | str:
    try:
        return toolchain.toolchain()
    except ToolchainError as error:
        return str(error)


def tools_or_skip() -> Toolchain:
    """Return the compiler, or skip the module without one.

    Modules call it at import, before tests change the location of nvcc.
    """
    tools = _tools()
    if isinstance(tools, str):
        pytest.skip(tools, allow_module_level=True)
    return tools


def cache_of(factory: pytest.TempPathFactory, *units: TranslationUnit) -> Path:
    """Return a new cache that contains units."""
    home = factory.mktemp("a cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("QSYNC_KERNELS_PATH", raising=False)
        patch.setenv("QSYNC_CACHE_DIR", str(home))
        build(list(units), progress=False)
    return home


@pytest.fixture(scope="session")
def one_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with `UNIT`."""
    return cache_of(tmp_path_factory, UNIT)


@pytest.fixture
def home(one_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of `one_library` as the user's cache."""
    copy = tmp_path / "the cache"
    shutil.copytree(one_library, copy)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(copy))
    monkeypatch.delenv("QSYNC_KERNELS_PATH", raising=False)
    return copy


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the number of compilations by nvcc."""
    return watched(tmp_path, monkeypatch)


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> Callable[[], int]:
    log, script = folder / "calls", folder / "nvcc"
    script.write_text(WRAPPER.format(real=tools_or_skip().nvcc.path, calls=log, before=before))
    script.chmod(0o755)
    monkeypatch.setenv("QSYNC_NVCC", str(script))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def entry_of(home: Path) -> kernel_cache.CacheEntry:
    (entry,) = kernel_cache.entries(home / "kernels")
    assert isinstance(entry, kernel_cache.CacheEntry)
    return entry


def nothing_is_left(home: Path) -> bool:
    return not list((home / "kernels").glob(".build-*"))
