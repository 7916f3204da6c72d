"""What a node of an fx.Graph says of itself: the line of the user's model that it comes from, what it calls, and with what.

Invariant: works on any node, whether passes know it or not; what reads a node changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns every argument of an operator's node by its name, in the order of the schema, defaults filled in.

    A node's own `args` end where the call's did: what was left out is not there, and what was given by name stands elsewhere.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), node.format_node()
    return filled(target, node.args, node.kwargs)


def filled(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every argument of a call by its name, in the order of the schema; one without a default that is not given is None."""
    schema = target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return {
        a.name: given[a.name]
        if a.name in given
        else kwargs.get(a.name, a.default_value if a.has_default_value() else None)
        for a in schema
    }


def argument_at(given: Sequence[Any], place: int | tuple[int, int]) -> Any:
    """Returns the argument at a place among those of a call: one of them, or an item of one that is a list."""
    return given[place] if isinstance(place, int) else given[place[0]][place[1]]


def nodes_in(value: object) -> list[fx.Node]:
    """Returns the nodes in an argument: itself, or those in a list."""
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in nodes_in(item)]
    return [value] if isinstance(value, fx.Node) else []


def map_arguments(node: fx.Node, change: Callable[[int, Any], Any]) -> None:
    """Puts `change(position in the schema, argument)` in the place of each argument that a call gives, by position or by name."""
    positions = {name: at for at, name in enumerate(arguments(node))}
    node.args = tuple(change(at, value) for at, value in enumerate(node.args))
    node.kwargs = {name: change(positions[name], value) for name, value in node.kwargs.items()}
