"""How far something is that takes minutes: a bar on a terminal, a plain line now and then in a log.

Invariant: it writes to standard error alone, and in a log nothing of what is done within seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

_EVERY: Final = 15.0
"""Seconds without a line, at least."""


class Advance(Protocol):
    """What is told that a part is done."""

    def __call__(self, part: str, left: float | None = None) -> None:
        """Takes what the part is called, and the seconds that the rest will take; by default as much for each part as so far."""


@contextmanager
def progress(doing: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """Shows how much of something is done, on a terminal as soon as anything is; what it gives is told of each part.

    With `shown` false it shows nothing.
    """
    if not shown:
        yield lambda part, left=None: None
    elif sys.stderr.isatty():
        with _bar(doing, total) as advance:
            yield advance
    else:
        yield _Lines(doing, total)


class _Lines:
    """What is told in lines."""

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
    """What is done, and what is left."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin = total, 0, time.monotonic()

    def about(self, left: float | None) -> str:
        """Counts one part more; returns in words what the rest takes: `left`, or as much for each part as so far."""
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
