"""How wide what goes to standard output is.

Invariant: a terminal gets tables of its width, and so does whoever sets COLUMNS, which pagers and scripts know. Piped without it, lines are
as long as what they say, since other programs search them.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

# Rich wants a number, and no line is that long.
AS_LONG_AS_IT_TAKES = 100_000


def console() -> Console:
    """Returns the console for standard output."""
    return Console(width=None if sys.stdout.isatty() else columns() or AS_LONG_AS_IT_TAKES)


def columns() -> int | None:
    """Returns how wide output that is piped should be; None if nobody has said it."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and text.isascii() and 0 < int(text) < AS_LONG_AS_IT_TAKES else None
