"""Files that are written whole or not at all, and where those that can be made anew are kept.

Invariant: what is at a path is the old content or the new, whatever fails in between.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from qsync_fx.errors import QSyncError


def caches() -> Path:
    """Returns the folder for what can be made anew, which need not exist: $QSYNC_CACHE_DIR, or the platform's (~/.cache/qsync_fx)."""
    if named := os.environ.get("QSYNC_CACHE_DIR"):
        return Path(os.path.abspath(Path(named).expanduser()))
    return platformdirs.user_cache_path("qsync_fx", appauthor=False)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` by `text`; raises `QSyncError` and leaves what was there where that fails."""
    with _told(path):
        _replace(path, text)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises `QSyncError` where no file can be written at `path`, for whoever writes there after long work; leaves what is there.

    That a file can be made beside it is tried, since no permission says it of all file systems.
    """
    with _told(Path(path)):
        beside = _temporary(target_of(path))
        open(beside, "x").close()
        beside.unlink()


def target_of(path: str | os.PathLike[str]) -> Path:
    """Returns where a path leads to, through links; raises `QSyncError` where something lies there that is no file."""
    target = Path(os.path.realpath(path))
    # Not pathlib's, which raise for a name that is too long; writing says what is wrong with it.
    if os.path.exists(target) and not os.path.isfile(target):
        raise QSyncError("a file would replace something that is no file", where=str(path), do="give a new path")
    return target


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise QSyncError(
            f"the file cannot be written: {error.strerror or error}",
            where=str(path),
            do="check that the folder exists, is writable and has space",
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _replace(path: Path, text: str) -> None:
    temporary = _temporary(path)
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Writes the folder's entries to disk: the name is in the folder, not in the file. Some file systems cannot, and say so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
