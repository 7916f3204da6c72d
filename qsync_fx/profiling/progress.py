"""How far something is that takes minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(doing: str, total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's standard error how much of something is done; what it gives is called with the name of each part that is.

    With `shown` false it shows nothing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not (shown and sys.stderr.isatty())
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda part: bar.update(task, advance=1, description=part)
