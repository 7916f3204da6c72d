"""Whether what a process allocates lies in huge pages, which training on a CPU is faster with.

Invariant: it looks and changes nothing, and says nothing of systems whose files are not Linux's.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from qsync_fx import environment

SWITCH = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""What has glibc ask for huge pages: in the environment of a process before it starts."""

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)
"""The glibc that knows the switch first."""


@dataclass(frozen=True)
class HugePages:
    """What the system does, and what this process asks it for.

    Attributes:
        policy: of transparent huge pages: "always", "madvise" (those who ask have them) or "never"; "" where it cannot be known.
        asked: whether this process asks for them.
        can_ask: whether its C library is one that the switch is for.
    """

    policy: str
    asked: bool
    can_ask: bool

    @property
    def missing(self) -> bool:
        """Whether the process has none and would have them for the switch."""
        return self.policy == "madvise" and not self.asked and self.can_ask

    def __str__(self) -> str:
        if not self.policy:
            return "unknown"
        if self.policy == "always":
            return "used, by this system for all processes"
        if self.policy == "never":
            return "none: this system has them switched off (/sys/kernel/mm/transparent_hugepage/enabled)"
        if self.asked:
            return "used: this process asks for them"
        return f"not used: {SWITCH} python ... trains faster" if self.can_ask else "not used"


def huge_pages() -> HugePages:
    """Looks at the system and this process."""
    try:
        text = _POLICY.read_text()
    except OSError:
        text = ""
    # Another allocator that is loaded first does as it likes.
    is_libc_malloc = "malloc" not in environment.text("LD_PRELOAD")
    return of(text, environment.text("GLIBC_TUNABLES"), platform.libc_ver() if is_libc_malloc else ("", ""))


def of(policy: str, tunables: str, library: tuple[str, str]) -> HugePages:
    """Reads what a system says of itself.

    Args:
        policy: the file of transparent huge pages, which has the one that holds in brackets.
        tunables: GLIBC_TUNABLES of the process: settings between colons.
        library: name and version of the C library that allocates.
    """
    chosen = policy.partition("[")[2].partition("]")[0]
    name, version = library
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    # Of a setting that stands twice the last one holds; 2 asks for pages that are set aside.
    settings = dict(setting.partition("=")[::2] for setting in tunables.split(":"))
    known = name == "glibc" and parts >= _SINCE
    return HugePages(chosen, known and settings.get("glibc.malloc.hugetlb") in ("1", "2"), known)
