"""Folders of the kernel cache: location, permissions, removal of stale files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsync_fx.backend.cuda.kernel_build import kernel_cache
from qsync_fx.errors import KernelError
from tests.support.cuda.compiled.kernel_caches import UNIT, tools_or_skip
from tests.support.cuda.compiled.small_units import build, small_unit

pytest_plugins = ["tests.support.cuda.compiled.kernel_caches"]
tools_or_skip()


def test_world_writable_folder_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "kernels").chmod(0o777)
    with pytest.raises(KernelError, match="every user can write"):
        build([small_unit("other")])
    with pytest.raises(KernelError, match="every user can write"):
        build([UNIT])
    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(home / "kernels"))
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(KernelError, match="every user can write"):
        build([UNIT])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(home: Path) -> None:
    os.chown(home / "kernels", 12345, -1)
    with pytest.raises(KernelError, match="belongs to another user"):
        build([UNIT])


def test_a_folder_that_cannot_be_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(home / "file"))
    with pytest.raises(KernelError, match=r"cannot be stored[\s\S]*QSYNC_CACHE_DIR"):
        build([UNIT])


def test_the_folder_is_for_the_user_alone(tmp_path: Path) -> None:
    assert kernel_cache.prepare(tmp_path / "a/b").stat().st_mode & 0o077 == 0


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_CACHE_DIR", "/one")
    assert kernel_cache.root() == Path("/one/kernels")
    monkeypatch.delenv("QSYNC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert kernel_cache.root() == Path("/two/qsync_fx/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/three")
    assert kernel_cache.root() == Path("/home/three/.cache/qsync_fx/kernels")


def test_files_of_killed_processes_are_removed(home: Path) -> None:
    old, new = kernel_cache.workplace(home / "kernels"), kernel_cache.workplace(home / "kernels")
    (old / "tmp").mkdir()
    os.utime(old, (0, 0))
    kernel_cache.sweep(home / "kernels")
    assert not old.exists()
    assert new.exists()
