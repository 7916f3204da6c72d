"""Atomic file writes: after any failure, the old file is unchanged."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from qsync_fx.errors import QSyncError
from qsync_fx.formats import FORMATS
from qsync_fx.plan import Plan
from qsync_fx.plan.plan import PLAN
from qsync_fx.serialization.atomic_files import check_writable, write_text


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_text(path, "old")
    write_text(path, "ne\u00fc\n")
    assert path.read_bytes() == "ne\u00fc\n".encode()
    assert os.listdir(tmp_path) == ["table.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")]
)
def test_failed_write_preserves_the_old_file_only(
    step: str, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    write_text(path, "old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(QSyncError if isinstance(error, OSError) else error):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["table.json"]


def test_text_that_no_file_can_hold(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "table.json", "\ud800")
    assert os.listdir(tmp_path) == []


def test_the_folder_reaches_the_disk_after_the_name_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a loss of power may lose the name of a file that was reported as written."""
    synced: list[tuple[bool, list[str]]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(
            (
                stat.S_ISDIR(os.fstat(descriptor).st_mode),
                sorted(p.suffix for p in tmp_path.iterdir()),
            )
        )
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "table.json", "text")
    assert synced == [(False, [".tmp"]), (True, [".json"])]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(QSyncError, match="cannot be written") as caught:
        write_text(tmp_path / "nowhere" / "table.json", "text")
    assert caught.value.where == str(tmp_path / "nowhere" / "table.json")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_replaced_file_preserves_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(mode)
    write_text(path, "text")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    Plan(FORMATS["bf16"]).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode and Plan.load(path).default is FORMATS["bf16"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_of_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "plan.json", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o666 & ~mask


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("content", [None, "old"])
def test_check_writable_does_not_change_the_file(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    check_writable(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == (
        [] if content is None else [content]
    )


def test_unwritable_path_is_detected_before_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "table.json")
    for name in ("missing/table.json", "file/table.json", "folder", "link"):
        with pytest.raises(QSyncError) as caught:
            check_writable(tmp_path / name)
        assert caught.value.where == str(tmp_path / name)
        with pytest.raises(QSyncError):
            PLAN.write(tmp_path / name, "{}")
