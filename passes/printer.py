"""Text form of a graph, and the instruments of the pass manager: timing, snapshots, diffs.

Invariant: equal graphs have equal text. Instruments observe the pipeline without changing it.
"""

from __future__ import annotations

import difflib
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import describe, is_switch, target_name
from qsync_fx.graph.graph import PrecisionGraph, copied

LOG: Final = logging.getLogger("qsync")
"""Log of graphs, which torch configures by TORCH_LOGS="qsync"; the module qsync.py has its name."""
if LOG.level == logging.NOTSET:
    LOG.setLevel(logging.WARNING)  # not the level of the application's other logs


def graph_text(graph: PrecisionGraph, indent: str = "") -> str:
    """Return the graph as text; bodies of higher-order operators are indented below their node."""
    lines = []
    for node in graph.nodes:
        lines.append(indent + _line(graph, node))
        for body in node_metadata.bodies(node):
            lines.append(graph_text(body, indent + "    "))
    return "\n".join(lines)


def _line(graph: PrecisionGraph, node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = graph.value(node)
    head = f"%{node.name}"
    # The class name of a mode's value differs between versions of torch.
    if value is not None and not is_switch(node):
        head += f": {describe(value)}"
    if node.op == "placeholder":
        return f"{head} = input"
    if node.op == "get_attr":
        return f"{head} = attribute {node.target}"
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    name = target_name(node).removesuffix(".default")
    line = f"{head} = {name}({', '.join(arguments)})"
    if note := node_metadata.NOTE.get(node):
        line += f"  # {note.id} {note.kind}"
        if note.precision:
            line += f" {note.precision}"
        if note.output not in (None, note.precision):
            line += f"->{note.output}"
    return line


def _argument(value: Any) -> str:
    match value:
        case fx.Node():
            return f"%{value.name}"
        case list():
            return f"[{', '.join(map(_argument, value))}]"
        case tuple():
            return f"({', '.join(map(_argument, value))})"
        case dict():
            items = (f"{key}: {_argument(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case torch.dtype():
            return str(value).removeprefix("torch.")
    return repr(value)


class Instrument:
    """Observer that is called before and after every pass, and after its verification."""

    def before(self, name: str, graph: PrecisionGraph) -> None:
        pass

    def after(self, name: str, graph: PrecisionGraph) -> None:
        pass

    def verified(self, name: str, graph: PrecisionGraph) -> None:
        pass


@dataclass
class Timing(Instrument):
    """Seconds that each pass took, by name, without verification."""

    seconds: dict[str, float] = field(default_factory=dict)
    _started: float = 0.0

    def before(self, name: str, graph: PrecisionGraph) -> None:
        self._started = time.perf_counter()

    def after(self, name: str, graph: PrecisionGraph) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - self._started


@dataclass
class Snapshots(Instrument):
    """The graph after every pass, as text and as a copy, whose `module` can be run."""

    texts: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, PrecisionGraph] = field(default_factory=dict)

    def verified(self, name: str, graph: PrecisionGraph) -> None:
        self.texts[name] = graph_text(graph)
        self.graphs[name] = copied(graph)

    def diff(self, first: str, second: str) -> str:
        """Return a unified diff of the graphs after two passes."""
        before, after = self.texts[first].splitlines(), self.texts[second].splitlines()
        return "\n".join(difflib.unified_diff(before, after, first, second, lineterm="", n=2))


@dataclass
class GraphLog(Instrument):
    """Logs the graph after every pass that changes it; qsync.py explains the log."""

    _last: str = ""

    def verified(self, name: str, graph: PrecisionGraph) -> None:
        text = graph_text(graph)
        changed = text != self._last
        LOG.info("after pass %s%s", name, f"\n{text}" if changed else ": unchanged")
        self._last = text
