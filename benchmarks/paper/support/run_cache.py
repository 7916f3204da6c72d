"""Cache of completed runs in a file, from which an interrupted experiment resumes.

Invariant: the file is replaced atomically after each run; the key of a run is a hash of all its
settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.harness import to_write
from qsync_fx.serialization.atomic_files import write_text


class RunCache:
    """Cache of run results.

    Args:
        path: of the file, or None to cache in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._runs: dict[str, Any] = {}
        if path is not None and to_write(path).exists():
            self._runs = json.loads(path.read_text())

    def __contains__(self, settings: Mapping[str, Any]) -> bool:
        return _key(settings) in self._runs

    def get(self, settings: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Return the cached JSON value of a run with these settings; call `run` if missing."""
        key = _key(settings)
        if key not in self._runs:
            self._runs[key] = {"settings": settings, "found": run()}
            if self.path is not None:
                write_text(self.path, json.dumps(self._runs) + "\n")
        return self._runs[key]["found"]


def _key(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
