"""Schedules of the steps in a trace.

What stands still between two pieces of work is the framework's: so a schedule takes as long as its step did. After the
backward pass everything counts as the optimizer, but for waiting until gradients have arrived.

Each all-reduce stands for one parameter, the gradients of a bucket, which is ready once the work is done that was begun before the
all-reduce was asked for.

Invariant: forward pass, backward pass, optimizer and waiting add up to the step.

What was done in a trace, of a host or a device, and which gradients travelled.

On a CPU work is what operators do that no other operator called; on a GPU it is kernels, and copies, of all streams but those of
collectives, and belongs to the operator that asked for it. Operators are called by their name and which one of that name in the step it is;
their backward passes by the number that autograd gave to both.

Invariant: work is in the order in which it began.

Steps of several ranks, put together again.

A collective begins on a rank when that rank is ready and ends on all at once, so what a trace shows of it holds waiting for others. The
rank that came last waited for none: the shortest duration of all ranks is how long it travels, however their clocks differ.

Invariant: each rank is there once, all did the same all-reduces, and the step is the same one on all of them.
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
    """An all-reduce: when the host asked for it, when it ran, and the calls that may say of how much."""

    asked: float
    begin: float
    end: float
    said_by: tuple[Event, ...]


@dataclass(frozen=True)
class TraceWork:
    """A piece of work: when the host began it or asked for it, and when it ran; seconds."""

    name: str
    part: Part | None
    asked: float
    begin: float
    end: float


def work_of(events: Sequence[Event]) -> tuple[bool, list[TraceWork], list[Travel]]:
    """Returns whether a device did the work, the work, and the all-reduces."""
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
        launch = requested.get(event.number("correlation"))
        # The profiler may miss the begin of a trace: what nobody asked for is asked for when it runs.
        asker = event if launch is None else launch
        caller = within.of(asker)
        name = event.name if caller is None else names.get(id(caller), caller.name)
        part = _part(asker.name if caller is None else caller.name, asker.begin, optimizer)
        work.append(TraceWork(name, part, asker.begin, event.begin, event.end))
    return sorted(work, key=lambda item: item.begin)


class _Within:
    """Finds the outermost call of a thread that something happened in."""

    def __init__(self, calls: Sequence[Event]) -> None:
        self._calls: dict[tuple[str, str], list[Event]] = {}
        for call in calls:
            self._calls.setdefault(call.track, []).append(call)

    def of(self, event: Event) -> Event | None:
        calls = self._calls.get(event.track, [])
        index = bisect.bisect_right(calls, event.begin, key=lambda call: call.begin) - 1
        return calls[index] if index >= 0 and event.begin <= calls[index].end else None


def _launches(events: Sequence[Event]) -> dict[int | None, Event]:
    return {event.number("correlation"): event for event in events if event.category in _RUNTIME}


def _optimizers(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.name.startswith("Optimizer.step#")]


def _part(name: str, begin: float, optimizers: Sequence[Event]) -> Part | None:
    """Returns the pass that a call belongs to; None for the optimizer."""
    if name.startswith(_BACKWARD):
        return Part.BACKWARD
    return None if any(item.begin <= begin < item.end for item in optimizers) else Part.FORWARD


def _names(events: Sequence[Event], calls: Sequence[Event]) -> dict[int, str]:
    """Returns what operators are called, forward and backward alike, by the identity of the outermost call.

    Autograd numbers what it will have to differentiate, and the backward function has the number of its forward one.
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
    """On a CPU a thread of the backend does what was asked for, in the order in which it was."""
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
    """An all-reduce of a step.

    Attributes:
        elements, element_bytes: of what each rank gave; 0 and 4 where the trace does not say.
        seconds: how long it took, waiting for other ranks included, from when the one before it was over: gloo sends two at a time.
    """

    elements: int
    element_bytes: int
    seconds: float


@dataclass(frozen=True)
class TracedSchedule:
    """A step of a trace.

    Attributes:
        path: of the trace.
        rank, ranks: whose.
        name: of the step.
        seconds: how long it took.
        schedule: what was computed.
        sent: the all-reduces of gradients, in order.
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
    """Returns the steps of a trace; the whole trace where it has no marks of steps.

    Args:
        trace: what ran when.
        sizes: elements and bytes an element by recorded function, from an execution trace.

    Raises:
        ProfileError: there is no step with a backward pass.
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
            # A device lags behind its host: its step ends where the next one begins.
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
            "the trace holds no training step: there is no backward pass in it",
            where=shown(trace.path),
            do="profile loss.backward() and the optimizer's step, and call profile.step() after each",
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
                requested += [piece.asked] if part is Part.BACKWARD else []
            entries[part].append(
                Entry(piece.name, part, max(piece.end - max(piece.begin, now), 0.0))
            )
            requested += [piece.asked] if part is Part.BACKWARD else []
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
    """Returns the elements that travelled and the bytes of each; 0 and 4 where nothing says it."""
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
    """Returns the bytes of an element of a type as traces call it: "float", "Half", "c10::BFloat16"; 4 of one that torch has not."""
    result = getattr(torch, str(name).removeprefix("c10::").lower(), None)
    return result.itemsize if isinstance(result, torch.dtype) else 4


def _covered(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Returns how much of a stretch of time any span covers."""
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
    """Returns the steps of one rank's trace of Kineto, with the execution trace of the same run where there is one.

    Raises:
        ProfileError: a file is no such trace, is cut off or damaged, or holds no training step.
    """
    trace = kineto(path)
    return steps(trace, None if execution is None else sizes(execution_trace(execution), trace))


def common_step(ranks: Sequence[Sequence[TracedSchedule]]) -> list[TracedSchedule]:
    """Returns the step of median length among those that all ranks have, by its longest rank."""
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
    """Returns the seconds that each all-reduce of a step takes once all ranks are there."""
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
    """Returns a step of the run that was traced; with a cluster, that step on its links, devices and numbers of them.

    Args:
        traces: steps of one rank by name; with a cluster, of one rank of each class of devices. A run that was traced on one rank alone
            is taken to be alike on all, and its all-reduces for as long as they seemed.
        cluster: what to replay them on; None for what was traced.
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
        cluster = Cluster(
            {name: ClusterDevice(count=most if len(result) == 1 else 1) for name in result}
        )
        transfer = travelling(list(result.values())) if most > 1 else []
    else:
        travelling(list(result.values()))
        transfer = None
    count = len(next(iter(result.values())).sent) if cluster.ranks > 1 else 0
    schedules = {name: item.schedule for name, item in result.items()}
    return simulate(
        schedules, cluster, indices=[[index] for index in range(count)], transfer=transfer
    )
