"""Errors that state the problem, its location, and a remedy.

Invariant: every error that qsync_fx raises on purpose is a `QSyncError`, and its text has these
three parts in this order. An internal bug is never reported as a `QSyncError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class QSyncError(Exception):
    """Base class of all errors of qsync_fx.

    Args:
        description: the problem, in one sentence; stored as `what`.
        where: operator id and source line, file, or option.
        do: remedy for the user.
    """

    def __init__(
        self, description: str, *, where: str | None = None, do: str | None = None
    ) -> None:
        self.what, self.where, self.do = description, where, do
        super().__init__(description, where, do)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.do:
            lines.append(f"  do:    {self.do}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling between processes; the default loses keyword arguments."""
        return _restored, (type(self), dict(self.__dict__))


def _restored(kind: type[QSyncError], state: dict[str, Any]) -> QSyncError:
    error = kind(state["what"], where=state["where"], do=state["do"])
    error.__dict__.update(state)
    return error


class OptionError(QSyncError):
    """Unknown option of the backend, or invalid value of an option."""


class PrecisionError(QSyncError):
    """Unknown precision, or a precision that an operator or device cannot run."""


class PlanError(QSyncError):
    """Plan that cannot be read, or that does not fit the model."""


class PlanWarning(UserWarning):
    """Plan that is only partly applied; a `PlanError` with the option "strict"."""


class PassError(QSyncError):
    """Pass that failed or violated an invariant of the graph.

    Attributes:
        graph: text of the graph after the pass; "" without one.
        step: name of the pass.
        ours: whether only passes of qsync_fx ran, which indicates a bug in qsync_fx.
    """

    graph: str = ""
    step: str = ""
    ours: bool = False


class DeviceError(QSyncError):
    """Device that qsync_fx cannot run on."""


class ProfileError(QSyncError):
    """Profile, trace or cluster that cannot be read, or does not fit the model or machine."""


class RankError(QSyncError):
    """Disagreement of ranks, or failure of `rank` (None if unknown); raised on every rank."""

    rank: int | None = None


class KernelError(QSyncError):
    """CUDA kernel that cannot be compiled, loaded or run."""


class RefusedKernelError(KernelError):
    """CUDA kernel that compiles but must not be used, for example because it spills registers."""


class LaunchError(KernelError):
    """CUDA kernel that supports its operands but fails to launch."""


class ToolchainError(KernelError):
    """nvcc, host compiler or CUTLASS headers that are missing, unsupported or failing.

    `of_the_source`: whether another source may compile.
    """

    of_the_source: bool = False


def nearest(name: str, available: Iterable[str]) -> str:
    """Return advice for an unknown name: the closest available name, then all of them."""
    available = sorted(available)
    advice = f"known: {', '.join(available)}"
    if close := difflib.get_close_matches(name, available, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}? {advice}"
    return advice


def shown(text: str) -> str:
    """Return `text` quoted for an error message, truncated if it is long."""
    return repr(text) if len(text) <= 120 else f"{text[:100]!r}... ({len(text)} characters)"
