"""Progress of long tasks: a bar on a terminal, occasional lines in a log.

Invariant: output goes to standard error only; a log shows only tasks longer than `_EVERY`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

_EVERY: Final = 15.0
"""Minimum seconds between two lines in a log."""


class Advance(Protocol):
    """Callback for each completed part."""

    def __call__(self, part: str, left: float | None = None) -> None:
        """Count a part by its name; `left` is the remaining seconds, by default extrapolated."""


@contextmanager
def progress(doing: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of a task with `total` parts, and yield the callback for completed parts.

    If `shown` is false, the callback has no effect.
    """
    if not shown:
        yield lambda part, left=None: None
    elif sys.stderr.isatty():
        with _bar(doing, total) as advance:
            yield advance
    else:
        yield _Lines(doing, total)


class _Lines:
    def __init__(self, doing: str, total: int) -> None:
        self._doing, self._so_far = f"qsync: {doing}", _SoFar(total)
        self._said = time.monotonic()

    def __call__(self, part: str, left: float | None = None) -> None:
        about = self._so_far.about(left)
        now = time.monotonic()
        if now - self._said >= _EVERY:
            self._said = now
            print(f"{self._doing}: {self._so_far} ({part}){about}", file=sys.stderr, flush=True)


@contextmanager
def _bar(doing: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    so_far = _SoFar(total)
    columns = (
        TextColumn(doing, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(part: str, left: float | None = None) -> None:
            bar.update(task, advance=1, description=f"{part}{so_far.about(left)}")

        yield advance


class _SoFar:
    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin = total, 0, time.monotonic()

    def about(self, left: float | None) -> str:
        """Count a part and return the remaining time in words; extrapolate it if `left` is None."""
        from qsync_fx.formatting import roughly

        self._done += 1
        rest = self._total - self._done
        seconds = rest * self._passed / self._done if left is None else left
        return f", about {roughly(seconds)} left" if rest > 0 else ""

    def __str__(self) -> str:
        from qsync_fx.formatting import roughly

        return f"{self._done} of {self._total} after {roughly(self._passed)}"

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._begin
