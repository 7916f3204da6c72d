"""Atomic replacement of files, and the folder of the caches.

Invariant: after any failure the file has its old content or its new content. Replacing a file does
not change its permissions; the umask gives the permissions of a new file. A symbolic link stays,
and the file that it points to is replaced.
"""

from __future__ import annotations

import contextlib
import functools
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
    """Return $QSYNC_CACHE_DIR, or the platform's folder of caches; it need not exist."""
    if named := environment.text("QSYNC_CACHE_DIR"):
        return Path(os.path.abspath(Path(named).expanduser()))
    return platformdirs.user_cache_path("qsync_fx", appauthor=False)


def write_text(path: Path, text: str) -> None:
    """Replace the content of the file at `path`, or of the file that a link points to, by `text`.

    Raises:
        QSyncError: the file cannot be written. The old file is unchanged.
    """
    with _temporary_file(path) as (file, target):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, target)
        # Flush the folder, which contains the name, if the file system can.
        with contextlib.suppress(OSError):
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `QSyncError` if `write_text` would fail at `path`, before a long computation.

    It creates a temporary file, because permission bits are not reliable on every file system.
    """
    with _temporary_file(path):
        pass


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the target of a path through links; raise `QSyncError` if it exists and is no file."""
    target = Path(os.path.realpath(path))
    # Unlike pathlib's methods, these accept a name that is too long; the write reports it.
    if os.path.exists(target) and not os.path.isfile(target):
        message = "the path exists and is not a regular file"
        raise QSyncError(message, where=str(path), do="use another path")
    return target


@contextlib.contextmanager
def _temporary_file(path: str | os.PathLike[str]) -> Iterator[tuple[TextIO, Path]]:
    """Yield a file next to the target of `path`, and the target; remove the file on exit.

    If the target exists, the file gets its permissions.
    """
    try:
        target = target_of(path)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        # Created without permissions for others, so that the content of a private file never leaks.
        exists = target.exists()
        mode = 0o600 if exists else 0o666
        with contextlib.ExitStack() as stack:
            stack.callback(temporary.unlink, missing_ok=True)
            opener = functools.partial(os.open, mode=mode)
            file = stack.enter_context(open(temporary, "x", encoding="utf-8", opener=opener))
            if exists:
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            yield file, target
    except OSError as error:
        raise QSyncError(
            f"the file cannot be written: {error.strerror or error}",
            where=str(path),
            do="check that the folder exists, is writable and has space",
        ) from error
