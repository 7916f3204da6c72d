"""Whether the process of a rank on the same machine is still there.

A process that is killed closes its connections, and who waits for it in no collective does not see that. Invariant: one that is said to be
gone is gone; of one on another machine, or in another container, nothing is said.
"""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _STARTED = 0, 19
"""Where a process's state and start stand in its line of /proc, behind its name."""


def identity() -> str:
    """Returns what tells this process from every other; "" where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    except OSError:
        return ""


def gone(other: str) -> bool:
    """Whether a process on this machine that had this identity has ended."""
    mine, theirs = identity().split(), other.split()
    if len(mine) != 4 or len(theirs) != 4 or mine[:2] != theirs[:2]:
        return False
    try:
        found = _stat(int(theirs[2]))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return found[_STATE] in "ZX" or found[_STARTED] != theirs[3]


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
