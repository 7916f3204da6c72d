"""Execution traces, as `torch.profiler.ExecutionTraceObserver` writes them (Chakra's host traces): which operator was called by which, on
tensors of which sizes. They hold no times; those are in Kineto's trace of the same run, under the same numbers of recorded functions.

Invariant: nodes form a tree: each was called by one that there is, and none, over whatever others, by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from qsync_fx.codec import Path
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replay.traces.file import read
from qsync_fx.predictor.replay.traces.kineto import Kineto

_DO: Final = "write it with torch.profiler.ExecutionTraceObserver, and unregister that before the file is read"


@dataclass(frozen=True)
class Node:
    """A call.

    Attributes:
        name: of the operator or annotation.
        parent: the number of the call that it was made in.
        function: the number that Kineto calls "Record function id"; None where the trace says none.
        tensors: elements and bytes an element of the tensors that it was given, those in lists, too.
    """

    name: str
    parent: int
    function: int | None
    tensors: tuple[tuple[int, int], ...]


def execution_trace(path: Path) -> Mapping[int, Node]:
    """Reads an execution trace, by numbers of calls; raises `ProfileError` saying what is wrong with it."""
    tree, where = read(path, "execution trace"), shown(str(path))
    entries = tree.get("nodes")
    if not isinstance(entries, list) or not entries:
        raise ProfileError("the execution trace has no nodes", where=where, do=_DO)
    nodes: dict[int, Node] = {}
    for at, entry in enumerate(entries):
        identity, node = _node(entry, f"{where}, nodes[{at}]")
        if identity in nodes:
            raise ProfileError(f"two nodes have the id {identity}", where=f"{where}, nodes[{at}]", do=_DO)
        nodes[identity] = node
    _check_tree(nodes, where)
    return nodes


def sizes(nodes: Mapping[int, Node], traced: Kineto) -> Mapping[int, tuple[int, int]]:
    """Returns elements and bytes an element of the first tensor of each call, by the number that Kineto has for it.

    Raises:
        ProfileError: the two are not of one run.
    """
    by_function = {node.function: node for node in nodes.values() if node.function is not None}
    functions = {event.number("Record function id") for event in traced.events if event.category == "cpu_op"} - {None}
    if missing := functions - by_function.keys():
        what = f"{len(missing)} of {len(functions)} recorded functions are not in the execution trace"
        raise ProfileError(what, where=shown(traced.path), do="give the two traces of one run, over the same steps")
    return {function: node.tensors[0] for function, node in by_function.items() if node.tensors}


def _node(entry: object, where: str) -> tuple[int, Node]:
    if not isinstance(entry, dict):
        raise ProfileError("the node is no object", where=where, do=_DO)
    identity, parent, name = entry.get("id"), entry.get("ctrl_deps"), entry.get("name")
    if type(identity) is not int or type(parent) is not int or not isinstance(name, str):
        raise ProfileError("the node lacks its id, its name or ctrl_deps", where=where, do=_DO)
    attributes = entry.get("attrs", [])
    attributes = attributes if isinstance(attributes, list) else []
    function = next(
        (one.get("value") for one in attributes if isinstance(one, dict) and one.get("name") == "rf_id"), None
    )
    given = entry.get("inputs")
    values = given.get("values") if isinstance(given, dict) else None
    tensors = tuple(_tensors(values if isinstance(values, list) else []))
    return identity, Node(name, parent, function if type(function) is int else None, tensors)


def _tensors(values: Sequence[Any]) -> list[tuple[int, int]]:
    """Returns elements and bytes of tensors, which are written as [tensor, storage, offset, elements, bytes, device]."""
    found = []
    for value in values:
        if not isinstance(value, list):
            continue
        if len(value) == 6 and isinstance(value[5], str) and all(type(part) is int for part in value[:5]):
            found.append((value[3], value[4]))
        elif value and isinstance(value[0], list):
            found += _tensors(value)
    return found


def _check_tree(nodes: Mapping[int, Node], where: str) -> None:
    # The process is the root: it is its own caller, and named in brackets.
    settled = {at for at, node in nodes.items() if node.parent == at and node.name.startswith("[")}
    for start in nodes:
        path: dict[int, None] = {}
        at = start
        while at not in settled and at not in path:
            path[at] = None
            before, at = at, nodes[at].parent
            if at not in nodes:
                what = f"the execution trace is cut off: {shown(nodes[before].name)} was called by {at}, which is not in it"
                raise ProfileError(what, where=f"{where}, node {before}", do=_DO)
        if at in path:
            circle = list(path)[list(path).index(at) :]
            names = " by ".join(shown(nodes[one].name) for one in [*circle[:5], at])
            raise ProfileError(f"calls run in a circle: {names}", where=f"{where}, node {at}", do=_DO)
        settled |= path.keys()
