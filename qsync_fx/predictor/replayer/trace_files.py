"""Files of torch.profiler traces: Kineto traces and execution traces, plain or gzip-compressed.

A Kineto trace (`export_chrome_trace`) has timed events of hosts and devices. An execution trace
(`ExecutionTraceObserver`, a Chakra host trace) has the call tree and tensor sizes. Both share the
ids of recorded functions. Reading ends with valid data or `ProfileError`, within `_LARGEST` bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from qsync_fx.errors import ProfileError, shown
from qsync_fx.serialization.schema import Path, Schema

_LARGEST: Final = 2**30
_CUT: Final = "trace again, with fewer steps where the file is large"


def _no_trace(message: str, where: str) -> ProfileError:
    return ProfileError(message, where=where, do=_HOW_TO_EXPORT)


def _no_execution_trace(message: str, where: str) -> ProfileError:
    return ProfileError(message, where=where, do=_HOW_TO_RECORD)


def read(path: Path, noun: str) -> Mapping[str, Any]:
    """Return the JSON object in a file."""
    where = shown(str(path))
    # Only the file access of `Schema` is used: trace events are no dataclasses.
    data = Schema(object, noun, ProfileError, _CUT, None, largest=_LARGEST).read(path)
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(_LARGEST + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise ProfileError(
                f"the {noun} is cut off or damaged: {error}", where=where, do=_CUT
            ) from None
    if len(data) > _LARGEST:
        raise ProfileError(f"the {noun} is larger than {_LARGEST} bytes", where=where, do=_CUT)
    try:
        tree = json.loads(data)
    except json.JSONDecodeError as error:
        ends = error.pos >= len(data.rstrip()) - 1 or error.msg.startswith("Unterminated")
        message = "ends in the middle" if ends else f"is no JSON: {error.msg}"
        place = f"{where}, line {error.lineno}, column {error.colno}"
        raise ProfileError(f"the {noun} {message}", where=place, do=_CUT) from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProfileError(f"the {noun} is no JSON: {error}", where=where, do=_CUT) from None
    if not isinstance(tree, dict):
        raise ProfileError(f"the {noun} is no JSON object", where=where, do=_CUT)
    return tree


def number(value: object) -> float | None:
    """Return a finite number; None for other values. Some Kineto versions write numbers as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


_HOW_TO_EXPORT: Final = (
    "export the trace with torch.profiler.profile(...).export_chrome_trace once profiling has ended"
)


@dataclass(frozen=True, eq=False)
class Event:
    """Event of a thread or a stream with a duration.

    Attributes:
        name: name in the profiler.
        category: "cpu_op", "user_annotation", "kernel" and others.
        track: process and thread, or device and stream.
        begin, end: start and end in microseconds.
        args: further data of the event.
    """

    name: str
    category: str
    track: tuple[str, str]
    begin: float
    end: float
    args: Mapping[str, Any] = field(repr=False)

    def number(self, name: str) -> int | None:
        """Return an integer argument of the event; None if it has none of this name."""
        result = number(self.args.get(name))
        return None if result is None else int(result)


@dataclass(frozen=True)
class Kineto:
    """Kineto trace.

    Attributes:
        path: path of the file.
        rank: rank in torch.distributed; 0 without it.
        ranks: number of ranks.
        events: events of all threads and streams.
    """

    path: str
    rank: int
    ranks: int
    events: Sequence[Event]


def kineto(path: Path) -> Kineto:
    """Read a Kineto trace, compressed or not; raise `ProfileError` that locates a defect."""
    tree, where = read(path, "trace"), shown(str(path))
    entries = tree.get("traceEvents")
    if not isinstance(entries, list):
        raise _no_trace("the trace has no list of traceEvents", where)
    events = [
        _event(entry, f"{where}, traceEvents[{index}]")
        for index, entry in enumerate(entries)
        if _lasts(entry)
    ]
    if not events:
        raise ProfileError(
            "the trace has no event that lasts",
            where=where,
            do=f"{_HOW_TO_EXPORT}; an unfinished cycle of its schedule is empty",
        )
    _forwards(entries, where)
    group = _of_type(tree.get("distributedInfo"), dict)
    rank, ranks = number(group.get("rank", 0)), number(group.get("world_size", 1))
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise _no_trace("the trace's rank is not one of its ranks", f"{where}, distributedInfo")
    events.sort(key=lambda event: (event.begin, -event.end))
    return Kineto(str(path), int(rank), int(ranks), events)


def outermost(events: Sequence[Event]) -> list[Event]:
    """Return the events that are not within another event of the same track."""
    until: dict[tuple[str, str], float] = {}
    result = []
    for event in events:
        if event.begin >= until.get(event.track, float("-inf")):
            until[event.track] = event.end
            result.append(event)
    return result


def _lasts(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("ph") == "X"
        and entry.get("cat") not in ("Trace", "overhead")
    )


def _event(entry: Mapping[str, Any], where: str) -> Event:
    name, args = entry.get("name"), entry.get("args", {})
    begin, duration = number(entry.get("ts")), number(entry.get("dur"))
    if not isinstance(name, str) or not isinstance(args, dict):
        raise _no_trace("the event has no name", where)
    if begin is None or duration is None or duration < 0:
        wrong = "ts" if begin is None else "dur"
        message = (
            f"the event {shown(name)} has {wrong} {shown(str(entry.get(wrong)))}, which is no time"
        )
        raise _no_trace(message, where)
    track = (str(entry.get("pid")), str(entry.get("tid")))
    return Event(name, str(entry.get("cat", "")), track, begin, begin + duration, args)


def _forwards(entries: Sequence[Any], where: str) -> None:
    """Raise `ProfileError` if backward work precedes the forward work that it belongs to."""
    begun: dict[object, float] = {}
    arrows = [
        entry for entry in entries if isinstance(entry, dict) and entry.get("cat") == "fwdbwd"
    ]
    for entry in sorted(arrows, key=lambda entry: entry.get("ph") != "s"):
        index, name = number(entry.get("ts")), str(entry.get("id"))
        if index is None:
            raise _no_trace(f"the arrow {shown(name)} has no time", where)
        if entry.get("ph") == "s":
            begun[name] = index
        elif index < begun.get(name, index):
            message = (
                f"the trace runs in a circle: backward work {shown(name)} is before the forward "
                "work that it belongs to"
            )
            raise _no_trace(message, where)


_HOW_TO_RECORD: Final = (
    "write it with torch.profiler.ExecutionTraceObserver, and unregister that before the file is "
    "read"
)


@dataclass(frozen=True)
class Node:
    """Call in an execution trace.

    Attributes:
        name: name of the operator or annotation.
        parent: id of the calling node.
        function: Kineto's "Record function id"; None if the trace contains none.
        tensors: elements and bytes per element of its tensor arguments, including lists.
    """

    name: str
    parent: int
    function: int | None
    tensors: tuple[tuple[int, int], ...]


def execution_trace(path: Path) -> Mapping[int, Node]:
    """Read an execution trace, by node id; raise `ProfileError` that locates a defect."""
    tree, where = read(path, "execution trace"), shown(str(path))
    entries = tree.get("nodes")
    if not isinstance(entries, list) or not entries:
        raise _no_execution_trace("the execution trace has no nodes", where)
    nodes: dict[int, Node] = {}
    for index, entry in enumerate(entries):
        identity, node = _node(entry, f"{where}, nodes[{index}]")
        if identity in nodes:
            raise _no_execution_trace(
                f"two nodes have the id {identity}", f"{where}, nodes[{index}]"
            )
        nodes[identity] = node
    _check_tree(nodes, where)
    return nodes


def sizes(nodes: Mapping[int, Node], traced: Kineto) -> Mapping[int, tuple[int, int]]:
    """Return elements and bytes per element of each call's first tensor, by Kineto's function id.

    Raises:
        ProfileError: the two traces belong to different runs.
    """
    by_function = {node.function: node for node in nodes.values() if node.function is not None}
    functions = {
        event.number("Record function id") for event in traced.events if event.category == "cpu_op"
    } - {None}
    if missing := functions - by_function.keys():
        message = (
            f"{len(missing)} of {len(functions)} recorded functions are not in the execution trace"
        )
        raise ProfileError(
            message,
            where=shown(traced.path),
            do="give the two traces of one run, over the same steps",
        )
    return {function: node.tensors[0] for function, node in by_function.items() if node.tensors}


def _node(entry: object, where: str) -> tuple[int, Node]:
    if not isinstance(entry, dict):
        raise _no_execution_trace("the node is no object", where)
    identity, parent, name = entry.get("id"), entry.get("ctrl_deps"), entry.get("name")
    if type(identity) is not int or type(parent) is not int or not isinstance(name, str):
        raise _no_execution_trace("the node lacks its id, its name or ctrl_deps", where)
    function = None
    for item in _of_type(entry.get("attrs"), list):
        if isinstance(item, dict) and item.get("name") == "rf_id":
            function = item.get("value")
            break
    values = _of_type(_of_type(entry.get("inputs"), dict).get("values"), list)
    if type(function) is not int:
        function = None
    return identity, Node(name, parent, function, tuple(_tensors(values)))


T = TypeVar("T")


def _of_type(value: object, kind: type[T]) -> T:
    """Return a value of a trace; an empty one if it has another type."""
    return value if isinstance(value, kind) else kind()


def _tensors(values: Sequence[Any]) -> list[tuple[int, int]]:
    """Return elements and bytes per element of tensors.

    The trace writes a tensor as [tensor, storage, offset, elements, bytes per element, device].
    """
    result = []
    for value in values:
        if not isinstance(value, list):
            continue
        if (
            len(value) == 6
            and isinstance(value[5], str)
            and all(type(part) is int for part in value[:5])
        ):
            result.append((value[3], value[4]))
        elif value and isinstance(value[0], list):
            result += _tensors(value)
    return result


def _check_tree(nodes: Mapping[int, Node], where: str) -> None:
    # The root node is the process: it is its own parent, and its name is in brackets.
    settled = {
        index for index, node in nodes.items() if node.parent == index and node.name.startswith("[")
    }
    for start in nodes:
        path: dict[int, None] = {}
        index = start
        while index not in settled and index not in path:
            path[index] = None
            before, index = index, nodes[index].parent
            if index not in nodes:
                message = (
                    f"the execution trace is cut off: {shown(nodes[before].name)} was called by "
                    f"{index}, which is not in it"
                )
                raise _no_execution_trace(message, f"{where}, node {before}")
        if index in path:
            circle = list(path)[list(path).index(index) :]
            names = " by ".join(shown(nodes[item].name) for item in [*circle[:5], index])
            raise _no_execution_trace(f"calls run in a circle: {names}", f"{where}, node {index}")
        settled |= path.keys()
