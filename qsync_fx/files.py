"""Files that are written whole or not at all.

Invariant: what is at a path is the old content or the new, whatever fails in between.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from qsync_fx.errors import QSyncError


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` by `text`; raises `QSyncError` and leaves what was there where that fails."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise QSyncError(
            f"the file cannot be written: {error.strerror or error}",
            where=str(path),
            do="check that the folder exists, is writable and has space",
        ) from error
