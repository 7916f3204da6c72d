"""Schedules of the training steps in torch.profiler traces, of one or several ranks.

On a CPU, work is the outermost operator calls; on a GPU, kernels and copies, attributed to the
operator that launched them. Gaps between work count as framework overhead. Each all-reduce is one
parameter, the gradients of its bucket, ready when the work that was launched before it is done.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from qsync_fx.predictor.replayer.cluster_step import SimulatedStep, simulate
from qsync_fx.predictor.replayer.trace_files import (
    Event,
    Kineto,
    execution_trace,
    kineto,
    number,
    outermost,
    sizes,
)
from qsync_fx.predictor.times import Entry, Parameter, Part, Schedule
from qsync_fx.serialization.schema import Path

_BACKWARD: Final = "autograd::engine::evaluate_function: "
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME: Final = ("cuda_runtime", "cuda_driver", "hip_runtime")


@dataclass(frozen=True)
class Travel:
    """All-reduce of a trace.

    Attributes:
        asked: time at which the host requested it.
        begin, end: start and end of the execution.
        said_by: events that may contain its size.
    """

    asked: float
    begin: float
    end: float
    said_by: tuple[Event, ...]


@dataclass(frozen=True)
class TraceWork:
    """Piece of work of a trace; times in seconds.

    Attributes:
        name: name of the operator.
        part: forward or backward pass; None for the optimizer.
        asked: time at which the host started or launched it.
        begin, end: start and end of the execution.
    """

    name: str
    part: Part | None
    asked: float
    begin: float
    end: float


def work_of(events: Sequence[Event]) -> tuple[bool, list[TraceWork], list[Travel]]:
    """Return whether a device did the work, the work in order of its start, and the all-reduces."""
    calls = outermost([event for event in events if event.category == "cpu_op"])
    if any(event.category in _ON_DEVICE for event in events):
        return True, _of_device(events, calls), _sent_by_device(events)
    return False, _of_host(events, calls), _sent_by_host(events)


def _of_host(events: Sequence[Event], calls: Sequence[Event]) -> list[TraceWork]:
    optimizer, names = _optimizers(events), _names(events, calls)
    return [
        TraceWork(
            names.get(id(call), call.name),
            _part(call.name, call.begin, optimizer),
            call.begin,
            call.begin,
            call.end,
        )
        for call in calls
    ]


def _of_device(events: Sequence[Event], calls: Sequence[Event]) -> list[TraceWork]:
    optimizer, names, requested = _optimizers(events), _names(events, calls), _launches(events)
    within = _Within(calls)
    work = []
    for event in events:
        if event.category not in _ON_DEVICE or _is_collective(event):
            continue
        # The profiler can miss launches at the start of a trace. Then the start time is used.
        asker = requested.get(event.number("correlation"), event)
        caller = within.of(asker)
        name, called = event.name, asker.name
        if caller is not None:
            name, called = names.get(id(caller), caller.name), caller.name
        part = _part(called, asker.begin, optimizer)
        work.append(TraceWork(name, part, asker.begin, event.begin, event.end))
    return sorted(work, key=lambda item: item.begin)


class _Within:
    """Lookup of the outermost call of a thread at the time of an event."""

    def __init__(self, calls: Sequence[Event]) -> None:
        self._calls: dict[tuple[str, str], list[Event]] = {}
        for call in calls:
            self._calls.setdefault(call.track, []).append(call)

    def of(self, event: Event) -> Event | None:
        calls = self._calls.get(event.track, [])
        index = bisect.bisect_right(calls, event.begin, key=lambda call: call.begin) - 1
        if index < 0 or event.begin > calls[index].end:
            return None
        return calls[index]


def _launches(events: Sequence[Event]) -> dict[int | None, Event]:
    return {event.number("correlation"): event for event in events if event.category in _RUNTIME}


def _optimizers(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.name.startswith("Optimizer.step#")]


def _part(name: str, begin: float, optimizers: Sequence[Event]) -> Part | None:
    """Return the pass that a call belongs to; None for the optimizer."""
    if name.startswith(_BACKWARD):
        return Part.BACKWARD
    if any(item.begin <= begin < item.end for item in optimizers):
        return None
    return Part.FORWARD


def _names(events: Sequence[Event], calls: Sequence[Event]) -> dict[int, str]:
    """Return operator names by the `id` of the outermost call, equal for forward and backward pass.

    A name is the operator's name with its index within the step. A backward function has the same
    autograd sequence number as its forward operator.
    """
    names: dict[int, str] = {}
    numbered: dict[int | None, str] = {}
    marks = iter([event.begin for event in events if event.name.startswith("ProfilerStep#")])
    following, counts = next(marks, float("inf")), dict[str, int]()
    within = _Within(calls)
    for call in calls:
        while call.begin >= following:
            following, counts = next(marks, float("inf")), {}
        if not call.name.startswith(_BACKWARD):
            number_of = counts[call.name] = counts.get(call.name, -1) + 1
            names[id(call)] = f"{call.name}#{number_of}"
    for event in events:
        index = event.number("Sequence number")
        if event.category == "cpu_op" and index is not None and "Backward" not in event.name:
            caller = within.of(event)
            if caller is not None and id(caller) in names:
                numbered[index] = names[id(caller)]
    for call in calls:
        if call.name.startswith(_BACKWARD):
            owned = call.name.removeprefix(_BACKWARD)
            names[id(call)] = numbered.get(call.number("Sequence number"), owned)
    return names


def _is_collective(event: Event) -> bool:
    return event.name.lower().startswith("nccl") or "Collective name" in event.args


def _sent_by_device(events: Sequence[Event]) -> list[Travel]:
    requested = _launches(events)
    result = []
    for event in events:
        kind = str(event.args.get("Collective name", event.name)).lower().replace("_", "")
        if event.category == "kernel" and _is_collective(event) and "allreduce" in kind:
            launch = requested.get(event.number("correlation"), event)
            result.append(Travel(launch.begin, event.begin, event.end, (event,)))
    return result


def _sent_by_host(events: Sequence[Event]) -> list[Travel]:
    """Pair requests with executions: on a CPU a backend thread executes requests in order."""
    requested = [event for event in events if event.name == "c10d::allreduce_"]
    done = [
        event
        for event in events
        if event.name.endswith(":all_reduce") and event.category == "user_annotation"
    ]
    pairs = zip(requested, done, strict=False)
    return [Travel(item.begin, other.begin, other.end, (other, item)) for item, other in pairs]


@dataclass(frozen=True)
class Sent:
    """All-reduce of a step.

    Attributes:
        elements, element_bytes: size of each rank's contribution; 0 and 4 if unknown.
        seconds: duration from the end of the previous all-reduce, including the wait for other
            ranks. gloo runs two at a time.
    """

    elements: int
    element_bytes: int
    seconds: float


@dataclass(frozen=True)
class TracedSchedule:
    """Step of a trace.

    Attributes:
        path: path of the trace.
        rank, ranks: rank of the trace and number of ranks.
        name: name of the step.
        seconds: duration of the step.
        schedule: schedule of the computation.
        sent: all-reduces of gradients, in order.
    """

    path: str
    rank: int
    ranks: int
    name: str
    seconds: float
    schedule: Schedule
    sent: tuple[Sent, ...]


def steps(
    trace: Kineto, sizes: Mapping[int, tuple[int, int]] | None = None
) -> list[TracedSchedule]:
    """Return the steps of a trace; the full trace is one step if it contains no step marks.

    Args:
        trace: the Kineto trace.
        sizes: elements and bytes per element by recorded function, from an execution trace.

    Raises:
        ProfileError: the trace contains no step with a backward pass.
    """
    seconds = [
        replace(event, begin=event.begin / 1e6, end=event.end / 1e6) for event in trace.events
    ]
    marks = [
        event
        for event in seconds
        if event.name.startswith("ProfilerStep#") and event.category == "user_annotation"
    ]
    if not marks:
        begin, end = seconds[0].begin, max(event.end for event in seconds)
        marks = [Event("the whole trace", "", ("", ""), begin, end, {})]
    device, work, sent = work_of(seconds)
    result = []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        owned = [item for item in work if mark.begin <= item.asked < mark.end]
        if not any(item.part is Part.BACKWARD for item in owned):
            continue
        begin, end = mark.begin, mark.end
        if device:
            # A device lags behind its host: its step ends when its next step begins.
            later = [
                item.begin
                for item in work
                if following is not None and following.begin <= item.asked < following.end
            ]
            begin, end = owned[0].begin, min(later, default=owned[0].begin)
        end = max(end, *(item.end for item in owned))
        travelled = [item for item in sent if mark.begin <= item.asked < mark.end]
        result.append(_step(trace, mark.name, (begin, end), owned, travelled, sizes or {}))
    if not result:
        raise ProfileError(
            "the trace contains no training step: it has no backward pass",
            where=shown(trace.path),
            do="profile loss.backward() and the optimizer's step, and call profile.step() after "
            "each",
        )
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
    passes = (
        (Part.FORWARD, work[: backward[0]]),
        (Part.BACKWARD, work[backward[0] : backward[-1] + 1]),
    )
    entries: dict[Part, list[Entry]] = {Part.FORWARD: [], Part.BACKWARD: []}
    requested: list[float] = []
    now = begin
    for part, pieces in passes:
        for piece in pieces:
            if piece.begin > now:
                entries[part].append(Entry("", Part.OUTSIDE, piece.begin - now))
                if part is Part.BACKWARD:
                    requested.append(piece.asked)
            entries[part].append(
                Entry(piece.name, part, max(piece.end - max(piece.begin, now), 0.0))
            )
            if part is Part.BACKWARD:
                requested.append(piece.asked)
            now = max(now, piece.end)
    gradients = [item for item in travelled if requested[0] <= item.asked]
    result = [_amount(item, sizes) for item in gradients]
    ready = {}
    for index, item in enumerate(gradients):
        begun = [number for number, moment in enumerate(requested) if moment < item.asked]
        ready[_bucket(index)] = max(begun, default=0)
    busy = [(item.begin, item.end) for item in work[backward[-1] + 1 :]]
    travel = [(item.begin, item.end) for item in gradients]
    waiting = _covered(now, end, travel) - _covered(now, end, _common(busy, travel))
    optimizer = max(end - now - waiting, 0.0)
    parameters = tuple(Parameter(_bucket(index), *item) for index, item in enumerate(result))
    schedule = Schedule(
        tuple(entries[Part.FORWARD]), tuple(entries[Part.BACKWARD]), optimizer, parameters, ready
    )
    ended = [begin, *(item.end for item in gradients)]
    sent = tuple(
        Sent(*size, max(item.end - max(item.begin, before), 0.0))
        for size, item, before in zip(result, gradients, ended, strict=False)
    )
    return TracedSchedule(trace.path, trace.rank, trace.ranks, name, end - begin, schedule, sent)


def _bucket(index: int) -> str:
    return f"bucket {index}"


def _amount(item: Travel, sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of elements and bytes per element of an all-reduce; 0 and 4 if unknown."""
    for event in item.said_by:
        function, count = event.number("Record function id"), event.number("In msg nelems")
        if function is not None and function in sizes:
            return sizes[function]
        if count is not None and count >= 0:
            return count, _element_bytes(event.args.get("dtype"))
        dims, types = event.args.get("Input Dims"), event.args.get("Input type")
        if (
            isinstance(dims, list)
            and dims
            and isinstance(dims[0], list)
            and dims[0]
            and isinstance(types, list)
        ):
            sides = [number(side) for side in dims[0]]
            if all(side is not None and side >= 0 for side in sides):
                return int(math.prod(side or 0 for side in sides)), _element_bytes(
                    types[0] if types else None
                )
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


def _common(
    ones: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    return [(max(a, c), min(b, d)) for a, b in ones for c, d in others if max(a, c) < min(b, d)]


_DO = "give the traces of one run, one of each rank"


def read_steps(path: Path, execution: Path | None = None) -> list[TracedSchedule]:
    """Return the steps of one rank's Kineto trace.

    Args:
        path: file of the Kineto trace.
        execution: file of the execution trace of the same run, if any.

    Raises:
        ProfileError: a file is not such a trace, is damaged, or contains no training step.
    """
    trace = kineto(path)
    if execution is None:
        return steps(trace)
    return steps(trace, sizes(execution_trace(execution), trace))


def common_step(ranks: Sequence[Sequence[TracedSchedule]]) -> list[TracedSchedule]:
    """Return the step of median duration, by its slowest rank, among the steps of all ranks."""
    every = [{step.name: step for step in item} for item in ranks]
    names = [name for name in every[0] if all(name in item for item in every)]
    if not names:
        message = f"no step is in all traces: {', '.join(every[0])} and {', '.join(every[-1])}"
        raise ProfileError(
            message, where=shown(ranks[-1][0].path), do="profile the same steps on all ranks"
        )
    seconds = {name: max(item[name].seconds for item in every) for name in names}
    middle = statistics.median_low(seconds.values())
    chosen = next(name for name in names if seconds[name] == middle)
    return [item[chosen] for item in every]


def travelling(ranks: Sequence[TracedSchedule]) -> list[float]:
    """Return the transfer time of each all-reduce of a step in seconds, without waiting.

    A collective starts on a rank when this rank is ready and ends on all ranks together, so traces
    include the wait for other ranks. The last rank does not wait: the minimum over ranks is the
    transfer time, independent of clock differences.

    Raises:
        ProfileError: the ranks send different gradients.
    """
    first = ranks[0]
    for item in ranks[1:]:
        if [(sent.elements, sent.element_bytes) for sent in item.sent] != [
            (sent.elements, sent.element_bytes) for sent in first.sent
        ]:
            message = (
                f"the ranks {first.rank} and {item.rank} send different gradients in {first.name}"
            )
            raise ProfileError(message, where=f"{shown(first.path)} and {shown(item.path)}", do=_DO)
    return [
        min(sent.seconds for sent in same)
        for same in zip(*(item.sent for item in ranks), strict=True)
    ]


def played_traces(
    traces: Mapping[str, Sequence[TracedSchedule]], cluster: Cluster | None = None
) -> SimulatedStep:
    """Return the simulated step of a traced run, optionally on another cluster.

    Args:
        traces: steps of each rank by name, or with `cluster`, of one rank of each device class. If
            only one rank of several was traced, all ranks count as equal, and its all-reduces keep
            their traced durations.
        cluster: cluster to simulate; None for the traced one.

    Raises:
        ProfileError: a rank is missing or occurs twice, or the ranks have no common step.
    """
    result = dict(zip(traces, common_step(list(traces.values())), strict=True))
    ranks = [item.rank for item in result.values()]
    if cluster is None and len(set(ranks)) != len(ranks):
        again = next(item for item in result.values() if ranks.count(item.rank) > 1)
        raise ProfileError(f"rank {again.rank} is there twice", where=shown(again.path), do=_DO)
    if cluster is None:
        (most, *others) = {item.ranks for item in result.values()}
        if others or len(result) not in (1, most):
            message = f"there are traces of {len(result)} ranks of {max(most, *others, 0)}"
            raise ProfileError(
                message, where=", ".join(shown(item.path) for item in result.values()), do=_DO
            )
        cluster = Cluster({name: ClusterDevice(count=most // len(result)) for name in result})
        transfer = travelling(list(result.values())) if most > 1 else []
    else:
        travelling(list(result.values()))
        transfer = None
    count = len(next(iter(result.values())).sent) if cluster.ranks > 1 else 0
    schedules = {name: item.schedule for name, item in result.items()}
    return simulate(
        schedules, cluster, indices=[[index] for index in range(count)], transfer=transfer
    )
