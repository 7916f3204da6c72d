"""Atomic replacement of files, and the folder of the caches.

Invariant: after any failure the file has its old content or its new content. Replacing a file does
not change its owner, group and permissions; the umask gives the permissions of a new file. A
symbolic link stays, and the file that it points to is replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import platformdirs

from qsync_fx import environment
from qsync_fx.errors import QSyncError


def caches() -> Path:
    """Return the folder of caches: $QSYNC_CACHE_DIR, or the platform's (~/.cache/qsync_fx).

    It need not exist.
    """
    if named := environment.text("QSYNC_CACHE_DIR"):
        return Path(os.path.abspath(Path(named).expanduser()))
    return platformdirs.user_cache_path("qsync_fx", appauthor=False)


def write_text(path: Path, text: str) -> None:
    """Replace the content of the file at `path`, or of the file that a link points to, by `text`.

    Raises:
        QSyncError: the file cannot be written, or cannot keep its owner. The old file is unchanged.
    """
    with _with_location(path):
        _replace(target_of(path), text)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `QSyncError` if `write_text` would fail at `path`, before a long computation.

    It leaves the file as it is. It creates a temporary file in the same folder, because permission
    bits are not reliable on every file system.
    """
    with _with_location(Path(path)):
        target = target_of(path)
        temporary = _temporary(target)
        try:
            _create_like(temporary, target).close()
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the target of a path through links; raise `QSyncError` if it exists and is no file."""
    target = Path(os.path.realpath(path))
    # Unlike pathlib's methods, these accept a name that is too long; the write reports it.
    if os.path.exists(target) and not os.path.isfile(target):
        raise QSyncError(
            "the path exists and is not a regular file", where=str(path), do="use another path"
        )
    return target


@contextlib.contextmanager
def _with_location(path: Path) -> Iterator[None]:
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
        with _create_like(temporary, path) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def _create_like(temporary: Path, path: Path) -> TextIO:
    """Create and open the temporary file that is to replace `path`.

    If there is a file at `path`, the temporary file gets its owner, group and permissions.
    """
    try:
        replaced = os.stat(path)
    except FileNotFoundError:
        return open(temporary, "x", encoding="utf-8")
    # Created without permissions for others, so that the content of a private file never leaks.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        created = os.fstat(descriptor)
        if (created.st_uid, created.st_gid) != (replaced.st_uid, replaced.st_gid):
            _change_owner(descriptor, replaced, path)
        # After the owner, since a change of the owner clears the set-user-ID and set-group-ID bits.
        os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "w", encoding="utf-8")


def _change_owner(descriptor: int, replaced: os.stat_result, path: Path) -> None:
    try:
        os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    except OSError as error:
        raise QSyncError(
            f"the owner of the file cannot be preserved, user {replaced.st_uid} and group "
            f"{replaced.st_gid}: {error.strerror or error}",
            where=str(path),
            do="use another path, or remove the file first",
        ) from error


def _sync(folder: Path) -> None:
    """Flush the folder's entries, which contain the names, to disk, if the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
