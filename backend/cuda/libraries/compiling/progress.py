"""What is said while kernels compile: nothing in the first second, then a bar on a terminal and plain lines elsewhere.

Invariant: it writes to standard error only, and of the processes of a training job only the first one says anything.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from qsync_fx import environment

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE: Final = 1.0
"""Seconds without a word."""

_LONG: Final = 5.0
"""Seconds that one waits for another process before it is said, and then again twelve times as long."""


class Waiting:
    """Says that a process waits for what others compile, which looks like one that hangs; all ranks say it, each for itself."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._next = _LONG

    def __call__(self, names: Sequence[str]) -> None:
        """Takes what others compile while this process compiles nothing; nothing, where it does not wait."""
        now = time.monotonic()
        if not names:
            self._since, self._next = None, _LONG
            return
        self._since = now if self._since is None else self._since
        if (passed := now - self._since) < self._next:
            return
        self._next += 12 * _LONG
        number = environment.launcher_number("RANK")
        rank = "" if number is None else f" (rank {number})"
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        print(
            f"qsync{rank}: has waited {passed:.0f} s for another process that compiles {names[0]}{more}; "
            "qsync kernels build compiles before a run",
            file=sys.stderr,
        )


class Watcher(Protocol):
    """What is told how far a build is."""

    def __call__(self, done: int, running: Sequence[str]) -> None:
        """Takes how many units are done, and the names of those that are being compiled; called several times a second."""


@contextlib.contextmanager
def watch(total: int, wanted: bool) -> Iterator[Watcher]:
    """Yields what to tell while `total` units are compiled."""
    if not wanted or environment.launcher_number("RANK"):
        yield lambda done, running: None
    elif sys.stderr.isatty():
        bar = _Bar(total)
        try:
            yield bar
        finally:
            bar.close()
    else:
        yield _Lines(total)


class _Bar:
    def __init__(self, total: int) -> None:
        self._total, self._since = total, time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, running: Sequence[str]) -> None:
        if self._shown is None:
            if time.monotonic() - self._since < _PATIENCE:
                return
            self._shown = self._start()
        bar, task = self._shown
        bar.update(task, completed=done, running=", ".join(running))

    def _start(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        what = TextColumn(
            "{task.fields[running]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        columns = (TextColumn("compiling CUDA kernels"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), what)
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar, bar.add_task("", total=self._total, running="")

    def close(self) -> None:
        if self._shown is not None:
            self._shown[0].stop()


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._since, self._said = total, time.monotonic(), -1

    def __call__(self, done: int, running: Sequence[str]) -> None:
        passed = time.monotonic() - self._since
        if passed >= _PATIENCE and done != self._said:
            now = f", now {', '.join(running)}" if running else ""
            print(f"qsync: compiling CUDA kernels: {done} of {self._total} after {passed:.0f} s{now}", file=sys.stderr)
            self._said = done
