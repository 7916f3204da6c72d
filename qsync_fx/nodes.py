"""What a node of an fx.Graph says of itself: the line of the user's model that it comes from, and what it calls.

Invariant: works on any node, whether passes know it or not; it changes none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class Source:
    """A line of the user's model."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def source_of(node: fx.Node) -> Source | None:
    """Returns the line of the user's model that a node comes from: the innermost frame of its stack trace."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith('File "') and '", line ' in lines[at]:
            file, _, rest = lines[at].removeprefix('File "').partition('", line ')
            code = lines[at + 1] if at + 1 < len(lines) and not lines[at + 1].startswith("File ") else ""
            return Source(file, int(rest.partition(",")[0]), code)
    return None


def target_name(node: fx.Node) -> str:
    """Returns a short name of what a node calls: "aten.linear.default" for operators, the function's name otherwise."""
    if isinstance(node.target, str):
        return node.target
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )
