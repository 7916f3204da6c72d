"""What hangs on the runner: timing, snapshots, diffs.

Invariant: an instrument watches a pipeline and changes nothing in it. Passes know of none.
"""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from typing import Protocol

from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.copies import copied
from qsync_fx.passes.running.text import graph_text


class Instrument(Protocol):
    """Called around every pass: before it, after it, and once the verifier has found nothing."""

    def before(self, name: str, graph: PrecisionGraph) -> None: ...

    def after(self, name: str, graph: PrecisionGraph) -> None: ...

    def verified(self, name: str, graph: PrecisionGraph) -> None: ...


@dataclass
class Timing:
    """Seconds that each pass took, by name, without the verifier's."""

    seconds: dict[str, float] = field(default_factory=dict)
    _started: float = 0.0

    def before(self, name: str, graph: PrecisionGraph) -> None:
        self._started = time.perf_counter()

    def after(self, name: str, graph: PrecisionGraph) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - self._started

    def verified(self, name: str, graph: PrecisionGraph) -> None:
        pass


@dataclass
class Snapshots:
    """The graph after every pass, as text and as a copy, whose `module` can be run."""

    texts: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, PrecisionGraph] = field(default_factory=dict)

    def before(self, name: str, graph: PrecisionGraph) -> None:
        pass

    def after(self, name: str, graph: PrecisionGraph) -> None:
        pass

    def verified(self, name: str, graph: PrecisionGraph) -> None:
        self.texts[name] = graph_text(graph)
        self.graphs[name] = copied(graph)

    def diff(self, first: str, second: str) -> str:
        """Returns a unified diff of the graphs after two passes."""
        lines = difflib.unified_diff(
            self.texts[first].splitlines(), self.texts[second].splitlines(), first, second, lineterm="", n=2
        )
        return "\n".join(lines)
