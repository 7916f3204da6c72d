"""Errors that say what is wrong, where, and what to do.

Invariant: every error that qsync_fx raises on purpose is a `QSyncError`, and its text has the three parts in this order. Code that
catches `QSyncError` catches nothing else; a bug in qsync_fx is never dressed up as one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class QSyncError(Exception):
    """Base of all errors of qsync_fx.

    Args:
        what: what is wrong, one sentence.
        where: the operator id and source line, file, or option it concerns.
        do: what the user can do about it.
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
        """Errors cross processes: what `pickle` does by itself would lose the names of the arguments."""
        return _restored, (type(self), dict(self.__dict__))


def _restored(kind: type[QSyncError], state: dict[str, Any]) -> QSyncError:
    error = kind(state["what"], where=state["where"], do=state["do"])
    error.__dict__.update(state)
    return error


class OptionError(QSyncError):
    """An option of the backend that is unknown or has a value that it cannot take."""


class PrecisionError(QSyncError):
    """A precision that is unknown, or that an operator or device cannot run."""


class PlanError(QSyncError):
    """A plan that cannot be read, or that does not fit the model."""


class PlanWarning(UserWarning):
    """A plan that is not applied as a whole; with the option "strict" the same is a `PlanError`."""


class PassError(QSyncError):
    """A pass that failed or broke an invariant of the graph.

    Attributes:
        graph: the text of the graph as the pass left it; "" where there is none.
        step: the name of the pass.
        ours: whether it is a pass of qsync_fx, on a graph that no other pass has changed: then it is a bug in qsync_fx.
    """

    graph: str = ""
    step: str = ""
    ours: bool = False


class DeviceError(QSyncError):
    """A device that qsync_fx cannot run on."""


class ProfileError(QSyncError):
    """A profile, trace or cluster that cannot be read, or that does not fit the model or the machine."""


class RankError(QSyncError):
    """Ranks that train together do not agree, or one of them has failed; every rank is told which.

    Attributes:
        rank: the one that failed or that differs; None where that is not known.
    """

    rank: int | None = None


class KernelError(QSyncError):
    """A CUDA kernel that cannot be compiled, loaded or run."""


class RefusedKernelError(KernelError):
    """A CUDA kernel that compiles, and must not be used: it spills, say. Another one may do the same without."""


class LaunchError(KernelError):
    """A CUDA kernel that takes its operands and cannot be started."""


class ToolchainError(KernelError):
    """nvcc, the host compiler or the CUTLASS headers: missing, of a version that does not serve, or failing.

    Attributes:
        output: what the failing tool printed, in full; "" where none ran.
        of_the_source: whether it failed over this very source, so that another one may do.
    """

    output: str = ""
    of_the_source: bool = False


def nearest(name: str, available: Iterable[str]) -> str:
    """Returns advice for a name that was not found: the nearest known one, then all of them."""
    available = sorted(available)
    close = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    everything = "known: " + ", ".join(available)
    return f"did you mean {close[0]!r}? {everything}" if close else everything


def shown(text: str) -> str:
    """Returns `text` quoted for an error message, cut where it is long: it may come from anywhere."""
    return repr(text) if len(text) <= 120 else f"{text[:100]!r}... ({len(text)} characters)"
