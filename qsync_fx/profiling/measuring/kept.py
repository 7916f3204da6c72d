"""What the lines of a wrapper compute, kept beside the wrapper in the folder of Inductor's caches.

torch finds a graph that it compiled before in its caches, which spares most of the time that compiling takes, and says nothing then of the
nodes that kernels were made of.

Invariant: what is kept is of one wrapper and one model: another model may have the same graph, and its operators other ids. A file that
is not there, or not readable, is as good as none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsync_fx.codec import Schema
from qsync_fx.errors import ProfileError


@dataclass(frozen=True)
class Computed:
    """A node that a kernel computes.

    Attributes:
        owner: the id of the operator whose time it takes; None where it belongs to none.
        target: what the node calls.
        bytes: what it reads and writes; nothing for what only shows memory in another way.
        quantizes: where it is a quantizer, the names of the formats that it reads and makes, and how many elements; else None.
    """

    owner: str | None
    target: str
    bytes: int
    quantizes: tuple[str, str, int] | None


@dataclass(frozen=True)
class Kernel:
    """What one line of a wrapper calls.

    Attributes:
        name: of the kernel, without its number.
        library: whether it is a call of a library, and no code that Inductor has written.
        nodes: what it computes; of a library's call one.
    """

    name: str
    library: bool
    nodes: tuple[Computed, ...]


Files = Mapping[str, Mapping[int, Kernel]]
"""By the path of a wrapper: the kernel that each line calls."""


@dataclass(frozen=True)
class _Kept:
    """
    Attributes:
        wrapper: a digest of its text.
        lines: the kernel that each calls, by its number.
    """

    wrapper: str
    lines: dict[str, Kernel]


_KEPT = Schema(
    _Kept,
    noun="note on compiled code",
    error=ProfileError,
    remedy="remove it",
    name="qsync-kernels",
    largest=64 * 2**20,
)


def keep(wrapper: str, model: str, lines: Mapping[int, Kernel]) -> None:
    """Keeps what the lines of a wrapper compute for a model; where nothing can be written there, nothing is kept."""
    try:
        kept = _Kept(_digest(wrapper), {str(at): kernel for at, kernel in lines.items()})
        _KEPT.write(_beside(wrapper, model), _KEPT.encode(kept))
    except (OSError, ProfileError):
        return


def lines_of(wrapper: str, model: str) -> dict[int, Kernel] | None:
    """Returns what was kept of a wrapper for a model; None where nothing was."""
    try:
        kept = _KEPT.load(_beside(wrapper, model))
        if kept.wrapper != _digest(wrapper):
            return None
        return {int(at): kernel for at, kernel in kept.lines.items()}
    except (OSError, ValueError, ProfileError):
        return None


def _beside(wrapper: str, model: str) -> Path:
    return Path(f"{wrapper}.{hashlib.sha256(model.encode()).hexdigest()[:16]}.json")


def _digest(wrapper: str) -> str:
    return hashlib.sha256(Path(wrapper).read_bytes()).hexdigest()[:16]
