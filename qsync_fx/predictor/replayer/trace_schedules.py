"""Schedules of the training steps in torch.profiler traces, of one or several ranks.

On a CPU, work is the outermost operator calls; on a GPU, kernels and copies, attributed to the
operator that launched them. Gaps between work count as framework overhead. Each all-reduce is one
parameter, the gradients of its bucket, ready when the work that was launched before it is done.
"""

from __future__ import annotations

import bisect
import gzip
import io
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch

from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from qsync_fx.predictor.replayer.cluster_step import SimulatedStep, simulate
from qsync_fx.serialization.schema import Path, Schema

_LARGEST: Final = 2**30
_CUT: Final = "trace again, with fewer steps where the file is large"
_HOW_TO_EXPORT: Final = (
    "export the trace with torch.profiler.profile(...).export_chrome_trace once profiling has ended"
)


def _no_trace(message: str, where: str) -> ProfileError:
    return ProfileError(message, where=where, do=_HOW_TO_EXPORT)


def read(path: Path, noun: str) -> Mapping[str, Any]:
    """Return the JSON object in a file."""
    # Trace events are no dataclasses, so the file is parsed without a reader of its content.
    schema = Schema(object, noun, ProfileError, _CUT, None, largest=_LARGEST, smaller=_CUT)
    data = schema.read(path)
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(_LARGEST + 1)
        tree = schema.parsed(data).tree
    except (EOFError, OSError, zlib.error) as error:
        message = f"the {noun} is cut off or damaged: {error}"
        raise ProfileError(message, where=shown(str(path)), do=_CUT) from None
    except ProfileError as error:
        raise schema.within(path, error) from None
    if not isinstance(tree, dict):
        raise ProfileError(f"the {noun} is no JSON object", where=shown(str(path)), do=_CUT)
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


@dataclass(frozen=True, eq=False)
class Event:
    """Event of a thread or a stream, in microseconds; its track is the thread or the stream."""

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
    """Kineto trace of one of `ranks` ranks: the events of all threads and streams."""

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
        if isinstance(entry, dict)
        and entry.get("ph") == "X"
        and entry.get("cat") not in ("Trace", "overhead")
    ]
    if not events:
        do = f"{_HOW_TO_EXPORT}; an unfinished cycle of its schedule is empty"
        raise ProfileError("the trace has no event that lasts", where=where, do=do)
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


def _event(entry: Mapping[str, Any], where: str) -> Event:
    name, args = entry.get("name"), entry.get("args", {})
    begin, duration = number(entry.get("ts")), number(entry.get("dur"))
    if not isinstance(name, str) or not isinstance(args, dict):
        raise _no_trace("the event has no name", where)
    if begin is None or duration is None or duration < 0:
        wrong = "ts" if begin is None else "dur"
        text = shown(str(entry.get(wrong)))
        raise _no_trace(f"the event {shown(name)} has {wrong} {text}, which is no time", where)
    track = (str(entry.get("pid")), str(entry.get("tid")))
    return Event(name, str(entry.get("cat", "")), track, begin, begin + duration, args)


def execution_sizes(path: Path) -> Mapping[int, Sequence[tuple[int, int]]]:
    """Return elements and bytes per element of each function's tensors, by Kineto's id."""
    entries = read(path, "execution trace").get("nodes")
    if not isinstance(entries, list) or not entries:
        do = "write it with torch.profiler.ExecutionTraceObserver, and unregister that first"
        raise ProfileError("the execution trace has no nodes", where=shown(str(path)), do=do)
    result: dict[int, Sequence[tuple[int, int]]] = {}
    for entry in entries:
        node = _of_type(entry, dict)
        attributes = [_of_type(item, dict) for item in _of_type(node.get("attrs"), list)]
        values = _of_type(_of_type(node.get("inputs"), dict).get("values"), list)
        for item in attributes:
            if item.get("name") == "rf_id" and type(item.get("value")) is int:
                result[item["value"]] = _tensors(values)
    return result


def sizes(path: Path, traced: Kineto) -> Mapping[int, tuple[int, int]]:
    """Return elements and bytes per element of each call's first tensor, by Kineto's function id.

    An execution trace of another run raises `ProfileError`.
    """
    recorded = execution_sizes(path)
    calls = (event for event in traced.events if event.category == "cpu_op")
    functions = {event.number("Record function id") for event in calls} - {None}
    if missing := functions - recorded.keys():
        counts = f"{len(missing)} of {len(functions)}"
        message = f"{counts} recorded functions are not in the execution trace"
        do = "give the two traces of one run, over the same steps"
        raise ProfileError(message, where=shown(traced.path), do=do)
    return {function: tensors[0] for function, tensors in recorded.items() if tensors}


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


_BACKWARD: Final = "autograd::engine::evaluate_function: "
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME: Final = ("cuda_runtime", "cuda_driver", "hip_runtime")


@dataclass(frozen=True)
class Travel:
    """All-reduce of a trace: request, start, end, and the events that may contain its size."""

    requested: float
    begin: float
    end: float
    size_events: tuple[Event, ...]


@dataclass(frozen=True)
class TraceWork:
    """Work with times in seconds; `part` is None for the optimizer, `launched` the launch time."""

    name: str
    part: Part | None
    launched: float
    begin: float
    end: float


class TraceEvents:
    """Work and all-reduces among the events of a trace, done by a device or by the host."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.on_device = any(event.category in _ON_DEVICE for event in events)
        self._calls = outermost([event for event in events if event.category == "cpu_op"])
        self._by_track: dict[tuple[str, str], list[Event]] = {}
        for call in self._calls:
            self._by_track.setdefault(call.track, []).append(call)
        launches = (event for event in events if event.category in _RUNTIME)
        self._launches = {event.number("correlation"): event for event in launches}
        self._optimizers = [event for event in events if event.name.startswith("Optimizer.step#")]

    def work(self) -> list[TraceWork]:
        """Return the work in order of its start: kernels and copies, else outermost calls."""
        pieces: Sequence[Event] = self._calls
        if self.on_device:
            on_device = (event for event in self.events if event.category in _ON_DEVICE)
            pieces = [event for event in on_device if not _is_collective(event)]
        names = self._names()
        result = []
        for event in pieces:
            launch = self._launch(event)
            caller = self._caller(launch)
            name, called = event.name, launch.name
            if caller is not None:
                name, called = names.get(id(caller), caller.name), caller.name
            part = self._part(called, launch.begin)
            result.append(TraceWork(name, part, launch.begin, event.begin, event.end))
        return sorted(result, key=lambda item: item.begin)

    def all_reduces(self) -> list[Travel]:
        """Return the all-reduces in the order of their requests.

        On a CPU two backend threads execute them, so that a later one may start first; their
        numbers have the order of requests.
        """
        if not self.on_device:
            requested = [event for event in self.events if event.name == "c10d::allreduce_"]
            marks = (event for event in self.events if event.category == "user_annotation")
            done = [event for event in marks if event.name.endswith(":all_reduce")]
            done.sort(key=lambda event: event.number("Record function id") or 0)
            pairs = zip(requested, done, strict=False)
            return [Travel(ask.begin, end.begin, end.end, (end, ask)) for ask, end in pairs]
        result = []
        for event in self.events:
            kind = str(event.args.get("Collective name", event.name)).lower().replace("_", "")
            if event.category == "kernel" and _is_collective(event) and "allreduce" in kind:
                begin = self._launch(event).begin
                result.append(Travel(begin, event.begin, event.end, (event,)))
        return result

    def _launch(self, event: Event) -> Event:
        """Return the launch of an event; itself if the profiler missed it, as at its start."""
        return self._launches.get(event.number("correlation"), event)

    def _caller(self, event: Event) -> Event | None:
        """Return the outermost call of a thread at the time of an event."""
        calls = self._by_track.get(event.track, [])
        index = bisect.bisect_right(calls, event.begin, key=lambda call: call.begin) - 1
        if index < 0 or event.begin > calls[index].end:
            return None
        return calls[index]

    def _part(self, name: str, begin: float) -> Part | None:
        """Return the pass that a call belongs to; None for the optimizer."""
        if name.startswith(_BACKWARD):
            return Part.BACKWARD
        if any(item.begin <= begin < item.end for item in self._optimizers):
            return None
        return Part.FORWARD

    def _names(self) -> dict[int, str]:
        """Return names by the `id` of the outermost call, equal for forward and backward pass.

        A name is the operator's name with its index within the step. A backward function has the
        same autograd sequence number as its forward operator.
        """
        names: dict[int, str] = {}
        numbered: dict[int | None, str] = {}
        marks = iter([item.begin for item in self.events if item.name.startswith("ProfilerStep#")])
        following, counts = next(marks, math.inf), Counter[str]()
        for call in self._calls:
            while call.begin >= following:
                following, counts = next(marks, math.inf), Counter()
            if not call.name.startswith(_BACKWARD):
                names[id(call)] = f"{call.name}#{counts[call.name]}"
                counts[call.name] += 1
        for event in self.events:
            index = event.number("Sequence number")
            if event.category == "cpu_op" and index is not None and "Backward" not in event.name:
                caller = self._caller(event)
                if caller is not None and id(caller) in names:
                    numbered[index] = names[id(caller)]
        for call in self._calls:
            if call.name.startswith(_BACKWARD):
                owned = call.name.removeprefix(_BACKWARD)
                names[id(call)] = numbered.get(call.number("Sequence number"), owned)
        return names


def _is_collective(event: Event) -> bool:
    return event.name.lower().startswith("nccl") or "Collective name" in event.args


@dataclass(frozen=True)
class TracedSchedule:
    """Step of a trace, in seconds.

    Parameters of the schedule are buckets, with 0 elements where a size is unknown. `sent` has the
    all-reduce of each from the end of the previous one, with waits; gloo runs two at a time.
    """

    path: str
    rank: int
    ranks: int
    name: str
    seconds: float
    schedule: Schedule
    sent: tuple[float, ...]


def steps(
    trace: Kineto, sizes: Mapping[int, tuple[int, int]] | None = None
) -> list[TracedSchedule]:
    """Return the steps of a trace; the full trace is one step if it contains no step marks.

    `sizes` are elements and bytes per element by recorded function, from an execution trace.
    """
    seconds = [replace(item, begin=item.begin / 1e6, end=item.end / 1e6) for item in trace.events]
    notes = (event for event in seconds if event.category == "user_annotation")
    marks = [event for event in notes if event.name.startswith("ProfilerStep#")]
    if not marks:
        begin, end = seconds[0].begin, max(event.end for event in seconds)
        marks = [Event("the whole trace", "", ("", ""), begin, end, {})]
    traced = TraceEvents(seconds)
    work, sent = traced.work(), traced.all_reduces()
    result = []
    by_step = [[item for item in work if mark.begin <= item.launched < mark.end] for mark in marks]
    for mark, owned, following in zip(marks, by_step, [*by_step[1:], []], strict=True):
        if not any(item.part is Part.BACKWARD for item in owned):
            continue
        begin, end = mark.begin, mark.end
        if traced.on_device:
            # A device lags behind its host: its step ends when its next step begins.
            begin = owned[0].begin
            end = min((item.begin for item in following), default=begin)
        end = max(end, *(item.end for item in owned))
        travelled = [item for item in sent if mark.begin <= item.requested < mark.end]
        result.append(_step(trace, mark.name, (begin, end), owned, travelled, sizes or {}))
    if not result:
        message = "the trace contains no training step: it has no backward pass"
        do = "profile loss.backward() and the optimizer, and call profile.step() after each"
        raise ProfileError(message, where=shown(trace.path), do=do)
    return result


def _step(
    trace: Kineto,
    name: str,
    within: tuple[float, float],
    work: Sequence[TraceWork],
    travelled: Sequence[Travel],
    sizes: Mapping[int, tuple[int, int]],
) -> TracedSchedule:
    begin, end = within
    backward = [index for index, item in enumerate(work) if item.part is Part.BACKWARD]
    entries: dict[Part, list[Entry]] = {Part.FORWARD: [], Part.BACKWARD: []}
    launched: dict[Part, list[float]] = {Part.FORWARD: [], Part.BACKWARD: []}
    now = begin
    for index, piece in enumerate(work[: backward[-1] + 1]):
        part = Part.FORWARD if index < backward[0] else Part.BACKWARD
        if piece.begin > now:
            entries[part].append(Entry("", Part.OUTSIDE, piece.begin - now))
            launched[part].append(piece.launched)
        seconds = max(piece.end - max(piece.begin, now), 0.0)
        entries[part].append(Entry(piece.name, part, seconds))
        launched[part].append(piece.launched)
        now = max(now, piece.end)
    requested = launched[Part.BACKWARD]
    gradients = [item for item in travelled if requested[0] <= item.requested]
    parameters, ready, sent = [], {}, []
    ended = begin
    for index, item in enumerate(gradients):
        parameters.append(Parameter(f"bucket {index}", *_amount(item, sizes)))
        begun = [number for number, moment in enumerate(requested) if moment < item.requested]
        ready[parameters[-1].path] = max(begun, default=0)
        sent.append(max(item.end - max(item.begin, ended), 0.0))
        ended = item.end
    travel = [(item.begin, item.end) for item in gradients]
    busy = [
        (max(item.begin, since), min(item.end, until))
        for item in work[backward[-1] + 1 :]
        for since, until in travel
    ]
    waiting = _covered(now, end, travel) - _covered(now, end, busy)
    optimizer = max(end - now - waiting, 0.0)
    passes = tuple(entries[Part.FORWARD]), tuple(entries[Part.BACKWARD])
    schedule = Schedule(*passes, optimizer, tuple(parameters), ready)
    seconds = end - begin
    return TracedSchedule(trace.path, trace.rank, trace.ranks, name, seconds, schedule, tuple(sent))


def _amount(item: Travel, sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of elements and bytes per element of an all-reduce; 0 and 4 if unknown."""
    for event in item.size_events:
        function, count = event.number("Record function id"), event.number("In msg nelems")
        if function is not None and function in sizes:
            return sizes[function]
        if count is not None and count >= 0:
            return count, _element_bytes(event.args.get("dtype"))
        try:
            dims, dtype = event.args["Input Dims"][0], event.args["Input type"][0]
            sides = [number(side) for side in dims]
        except (IndexError, KeyError, TypeError):
            continue
        if sides and all(side is not None and side >= 0 for side in sides):
            return int(math.prod(side or 0 for side in sides)), _element_bytes(dtype)
    return 0, 4


def _element_bytes(name: object) -> int:
    """Return the bytes of a dtype as named in traces: "float", "c10::BFloat16"; 4 if unknown."""
    result = getattr(torch, str(name).removeprefix("c10::").lower(), None)
    return result.itemsize if isinstance(result, torch.dtype) else 4


def _covered(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Return the part of an interval that the union of the spans covers, in seconds."""
    total, now = 0.0, begin
    for since, until in sorted(spans):
        since, until = max(since, now), min(until, end)
        if until > since:
            total, now = total + until - since, until
    return total


_DO = "give the traces of one run, one of each rank"


def read_steps(path: Path, execution: Path | None = None) -> list[TracedSchedule]:
    """Return the steps of one rank's Kineto trace, optionally with sizes of an execution trace."""
    trace = kineto(path)
    if execution is None:
        return steps(trace)
    return steps(trace, sizes(execution, trace))


def common_step(ranks: Sequence[Sequence[TracedSchedule]]) -> list[TracedSchedule]:
    """Return the step of median duration, by its slowest rank, among the steps of all ranks."""
    every = [{step.name: step for step in item} for item in ranks]
    names = [name for name in every[0] if all(name in item for item in every)]
    if not names:
        message = f"no step is in all traces: {', '.join(every[0])} and {', '.join(every[-1])}"
        do = "profile the same steps on all ranks"
        raise ProfileError(message, where=shown(ranks[-1][0].path), do=do)
    seconds = {name: max(item[name].seconds for item in every) for name in names}
    middle = statistics.median_low(seconds.values())
    chosen = next(name for name in names if seconds[name] == middle)
    return [item[chosen] for item in every]


def travelling(ranks: Sequence[TracedSchedule]) -> list[float]:
    """Return the transfer time of each all-reduce of a step in seconds, without waiting.

    Traces include the wait for other ranks, but the last rank does not wait: the minimum over ranks
    is the transfer time. Raises `ProfileError` if the ranks send different gradients.
    """
    first = ranks[0]
    for item in ranks[1:]:
        if item.schedule.parameters != first.schedule.parameters:
            ours = f"the ranks {first.rank} and {item.rank}"
            where = f"{shown(first.path)} and {shown(item.path)}"
            message = f"{ours} send different gradients in {first.name}"
            raise ProfileError(message, where=where, do=_DO)
    return [min(same) for same in zip(*(item.sent for item in ranks), strict=True)]


def played_traces(
    traces: Mapping[str, Sequence[TracedSchedule]], cluster: Cluster | None = None
) -> SimulatedStep:
    """Return the simulated step of a traced run, optionally on another cluster.

    Args:
        traces: steps of each rank by name, or with `cluster`, of one rank of each device class. A
            single traced rank of several stands for all of them.
    """
    result = dict(zip(traces, common_step(list(traces.values())), strict=True))
    ranks = [item.rank for item in result.values()]
    where = ", ".join(shown(item.path) for item in result.values())
    transfer: list[float] | None = travelling(list(result.values()))
    if cluster is not None:
        transfer = None
    else:
        if twice := [rank for rank in ranks if ranks.count(rank) > 1]:
            raise ProfileError(f"rank {twice[0]} is there twice", where=where, do=_DO)
        (most, *others) = {item.ranks for item in result.values()}
        if others or len(result) not in (1, most):
            message = f"there are traces of {len(result)} ranks of {max(most, *others, 0)}"
            raise ProfileError(message, where=where, do=_DO)
        cluster = Cluster({name: ClusterDevice(count=most // len(result)) for name in result})
    schedules = {name: item.schedule for name, item in result.items()}
    indices = [[index] for index in range(len(next(iter(result.values())).sent))]
    if cluster.ranks == 1:
        indices, transfer = [], None
    return simulate(schedules, cluster, indices=indices, transfer=transfer)
