"""Python's search for cycles rests while plans are searched for.

A search makes hundreds of thousands of objects that live until it ends, and hardly a cycle. Each few thousand of them have Python look for
cycles, now and then through all that the process holds: of one that has a model and torch that takes as long as a search, or longer.

Invariant: whether cycles are searched for is afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Lets no cycles be searched for meanwhile; what no cycle holds goes as ever."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
