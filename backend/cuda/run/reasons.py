"""Why torch computed what a kernel might have: kept while a process runs, for who wonders where the speed went.

Invariant: one sentence a problem and reason, and a bounded number of them: shapes may be without end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

_MOST: Final = 1000
_lock: Final = threading.Lock()
_kept: Final[OrderedDict[str, str]] = OrderedDict()


def note(problem: str, reason: str) -> None:
    """Keeps why torch computes a problem; the latest reason counts."""
    with _lock:
        _kept[problem] = reason
        _kept.move_to_end(problem)
        if len(_kept) > _MOST:
            _kept.popitem(last=False)


def reasons() -> dict[str, str]:
    """Returns problem -> reason for what torch has computed in this process, the latest last."""
    with _lock:
        return dict(_kept)


def forget() -> None:
    """Drops all reasons."""
    with _lock:
        _kept.clear()
