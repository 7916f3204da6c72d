"""What has been trained so far, in a file, so that an experiment that is interrupted goes on from there.

Invariant: the file is replaced whole after each run; what was run with other settings is not taken for this one's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.harness import to_write
from qsync_fx.serialization.atomic_files import write_text


class Kept:
    """
    Args:
        path: of the file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else to_write(path)
        self._known: dict[str, Any] = (
            json.loads(path.read_text()) if path is not None and path.exists() else {}
        )

    def get(self, settings: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Returns what a run with these settings gave, as JSON has it; runs it where it has not been yet."""
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self._known:
            self._known[key] = {"settings": settings, "found": run()}
            if self._path is not None:
                write_text(self._path, json.dumps(self._known) + "\n")
        return self._known[key]["found"]
