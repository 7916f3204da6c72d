"""Progress of long tasks: a bar of rich on a terminal, occasional lines in a log.

Invariant: output goes to standard error only.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from qsync_fx.formatting import roughly

_SOON: Final = 2.0
"""Seconds before `announced` names the work."""
_EVERY: Final = 15.0
"""Minimum seconds between two lines in a log."""


class Advance(Protocol):
    """Callback for completed parts of a task."""

    def __call__(self, part: str, left: float | None = None, count: int = 1) -> None:
        """Count `count` completed parts; `left` is the remaining seconds, by default extrapolated.

        With `count` 0, `part` names the running parts.
        """


_waiting: list[threading.Timer] = []


@contextmanager
def announced(doing: str, shown: bool = True) -> Iterator[None]:
    """Name the work on a terminal after `_SOON` seconds, unless a bar appears before."""
    if not (shown and sys.stderr.isatty()):
        yield
        return
    line = {"file": sys.stderr, "flush": True}
    timer = threading.Timer(_SOON, print, [f"qsync: {doing} ..."], line)
    timer.daemon = True
    _waiting.append(timer)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _waiting.remove(timer)


@contextmanager
def progress(doing: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of a task with `total` parts, and yield the callback for completed parts.

    Args:
        shown: if false, the callback has no effect.
    """
    if not shown:
        yield lambda part, left=None, count=1: None
        return
    if not sys.stderr.isatty():
        yield _Lines(doing, total)
        return
    for timer in _waiting:
        timer.cancel()
    bar = _Bar(doing, total)
    try:
        yield bar
    finally:
        bar.stop()


class _Counter:
    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin = total, 0, time.monotonic()

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._begin

    def _count(self, left: float | None, count: int) -> str:
        """Count parts and return the remaining time in words; extrapolate it if `left` is None."""
        self._done += count
        rest = self._total - self._done
        if left is None and self._done:
            left = rest * self._passed / self._done
        return f", about {roughly(left)} left" if left is not None and rest > 0 else ""


class _Lines(_Counter):
    def __init__(self, doing: str, total: int) -> None:
        super().__init__(total)
        self._doing, self._next = doing, self._begin + _EVERY

    def __call__(self, part: str, left: float | None = None, count: int = 1) -> None:
        about = self._count(left, count)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        so_far = f"{self._done} of {self._total} after {roughly(self._passed)}"
        name = f" ({part})" if part else ""
        print(f"qsync: {self._doing}: {so_far}{name}{about}", file=sys.stderr, flush=True)


class _Bar(_Counter):
    def __init__(self, doing: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(total)
        one_line = Column(no_wrap=True, overflow="ellipsis")
        columns = (
            TextColumn(doing, markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False, table_column=one_line),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def __call__(self, part: str, left: float | None = None, count: int = 1) -> None:
        about = self._count(left, count)
        self._bar.update(self._task, advance=count, description=f"{part}{about}")

    def stop(self) -> None:
        self._bar.stop()
