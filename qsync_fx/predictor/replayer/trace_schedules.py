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
from qsync_fx.predictor.replayer.trace_files import Event, Kineto, execution_trace, kineto, number, outermost, sizes
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
            names.get(id(call), call.name), _part(call.name, call.begin, optimizer), call.begin, call.begin, call.end
        )
        for call in calls
    ]


def _of_device(events: Sequence[Event], calls: Sequence[Event]) -> list[TraceWork]:
    optimizer, names, asked = _optimizers(events), _names(events, calls), _launches(events)
    within = _Within(calls)
    work = []
    for event in events:
        if event.category not in _ON_DEVICE or _is_collective(event):
            continue
        launch = asked.get(event.number("correlation"))
        # The profiler may miss the begin of a trace: what nobody asked for is asked for when it runs.
        asker = event if launch is None else launch
        caller = within.of(asker)
        name = event.name if caller is None else names.get(id(caller), caller.name)
        part = _part(asker.name if caller is None else caller.name, asker.begin, optimizer)
        work.append(TraceWork(name, part, asker.begin, event.begin, event.end))
    return sorted(work, key=lambda one: one.begin)


class _Within:
    """Finds the outermost call of a thread that something happened in."""

    def __init__(self, calls: Sequence[Event]) -> None:
        self._calls: dict[tuple[str, str], list[Event]] = {}
        for call in calls:
            self._calls.setdefault(call.track, []).append(call)

    def of(self, event: Event) -> Event | None:
        calls = self._calls.get(event.track, [])
        at = bisect.bisect_right(calls, event.begin, key=lambda call: call.begin) - 1
        return calls[at] if at >= 0 and event.begin <= calls[at].end else None


def _launches(events: Sequence[Event]) -> dict[int | None, Event]:
    return {event.number("correlation"): event for event in events if event.category in _RUNTIME}


def _optimizers(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.name.startswith("Optimizer.step#")]


def _part(name: str, begin: float, optimizers: Sequence[Event]) -> Part | None:
    """Returns the pass that a call belongs to; None for the optimizer."""
    if name.startswith(_BACKWARD):
        return Part.BACKWARD
    return None if any(one.begin <= begin < one.end for one in optimizers) else Part.FORWARD


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
        at = event.number("Sequence number")
        if event.category == "cpu_op" and at is not None and "Backward" not in event.name:
            caller = within.of(event)
            if caller is not None and id(caller) in names:
                numbered[at] = names[id(caller)]
    for call in calls:
        if call.name.startswith(_BACKWARD):
            own = call.name.removeprefix(_BACKWARD)
            names[id(call)] = numbered.get(call.number("Sequence number"), own)
    return names


def _is_collective(event: Event) -> bool:
    return event.name.lower().startswith("nccl") or "Collective name" in event.args


def _sent_by_device(events: Sequence[Event]) -> list[Travel]:
    asked = _launches(events)
    found = []
    for event in events:
        kind = str(event.args.get("Collective name", event.name)).lower().replace("_", "")
        if event.category == "kernel" and _is_collective(event) and "allreduce" in kind:
            launch = asked.get(event.number("correlation"), event)
            found.append(Travel(launch.begin, event.begin, event.end, (event,)))
    return found


def _sent_by_host(events: Sequence[Event]) -> list[Travel]:
    """On a CPU a thread of the backend does what was asked for, in the order in which it was."""
    asked = [event for event in events if event.name == "c10d::allreduce_"]
    done = [event for event in events if event.name.endswith(":all_reduce") and event.category == "user_annotation"]
    pairs = zip(asked, done, strict=False)
    return [Travel(one.begin, other.begin, other.end, (other, one)) for one, other in pairs]


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


def steps(trace: Kineto, sizes: Mapping[int, tuple[int, int]] | None = None) -> list[TracedSchedule]:
    """Returns the steps of a trace; the whole trace where it has no marks of steps.

    Args:
        trace: what ran when.
        sizes: elements and bytes an element by recorded function, from an execution trace.

    Raises:
        ProfileError: there is no step with a backward pass.
    """
    seconds = [replace(event, begin=event.begin / 1e6, end=event.end / 1e6) for event in trace.events]
    marks = [
        event for event in seconds if event.name.startswith("ProfilerStep#") and event.category == "user_annotation"
    ]
    if not marks:
        begin, end = seconds[0].begin, max(event.end for event in seconds)
        marks = [Event("the whole trace", "", ("", ""), begin, end, {})]
    device, work, sent = work_of(seconds)
    found = []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        own = [one for one in work if mark.begin <= one.asked < mark.end]
        if not any(one.part is Part.BACKWARD for one in own):
            continue
        begin, end = mark.begin, mark.end
        if device:
            # A device lags behind its host: its step ends where the next one begins.
            later = [
                one.begin for one in work if following is not None and following.begin <= one.asked < following.end
            ]
            begin, end = own[0].begin, min(later, default=own[0].begin)
        end = max(end, *(one.end for one in own))
        travelled = [one for one in sent if mark.begin <= one.asked < mark.end]
        found.append(_step(trace, mark.name, (begin, end), own, travelled, sizes or {}))
    if not found:
        raise ProfileError(
            "the trace holds no training step: there is no backward pass in it",
            where=shown(trace.path),
            do="profile loss.backward() and the optimizer's step, and call profile.step() after each",
        )
    return found


def _step(
    trace: Kineto,
    name: str,
    within: tuple[float, float],
    work: Sequence[TraceWork],
    travelled: Sequence[Travel],
    sizes: Mapping[int, tuple[int, int]],
) -> TracedSchedule:
    begin, end = within
    backward = [at for at, one in enumerate(work) if one.part is Part.BACKWARD]
    passes = ((Part.FORWARD, work[: backward[0]]), (Part.BACKWARD, work[backward[0] : backward[-1] + 1]))
    entries: dict[Part, list[Entry]] = {Part.FORWARD: [], Part.BACKWARD: []}
    asked: list[float] = []
    now = begin
    for part, pieces in passes:
        for piece in pieces:
            if piece.begin > now:
                entries[part].append(Entry("", Part.OUTSIDE, piece.begin - now))
                asked += [piece.asked] if part is Part.BACKWARD else []
            entries[part].append(Entry(piece.name, part, max(piece.end - max(piece.begin, now), 0.0)))
            asked += [piece.asked] if part is Part.BACKWARD else []
            now = max(now, piece.end)
    gradients = [one for one in travelled if asked[0] <= one.asked]
    found = [_amount(one, sizes) for one in gradients]
    ready = {}
    for at, one in enumerate(gradients):
        begun = [number for number, moment in enumerate(asked) if moment < one.asked]
        ready[_bucket(at)] = max(begun, default=0)
    busy = [(one.begin, one.end) for one in work[backward[-1] + 1 :]]
    travel = [(one.begin, one.end) for one in gradients]
    waiting = _covered(now, end, travel) - _covered(now, end, _common(busy, travel))
    optimizer = max(end - now - waiting, 0.0)
    parameters = tuple(Parameter(_bucket(at), *one) for at, one in enumerate(found))
    schedule = Schedule(tuple(entries[Part.FORWARD]), tuple(entries[Part.BACKWARD]), optimizer, parameters, ready)
    ended = [begin, *(one.end for one in gradients)]
    sent = tuple(
        Sent(*size, max(one.end - max(one.begin, before), 0.0))
        for size, one, before in zip(found, gradients, ended, strict=False)
    )
    return TracedSchedule(trace.path, trace.rank, trace.ranks, name, end - begin, schedule, sent)


def _bucket(at: int) -> str:
    return f"bucket {at}"


def _amount(one: Travel, sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Returns the elements that travelled and the bytes of each; 0 and 4 where nothing says it."""
    for event in one.said_by:
        function, count = event.number("Record function id"), event.number("In msg nelems")
        if function is not None and function in sizes:
            return sizes[function]
        if count is not None and count >= 0:
            return count, _element_bytes(event.args.get("dtype"))
        dims, types = event.args.get("Input Dims"), event.args.get("Input type")
        if isinstance(dims, list) and dims and isinstance(dims[0], list) and dims[0] and isinstance(types, list):
            sides = [number(side) for side in dims[0]]
            if all(side is not None and side >= 0 for side in sides):
                return int(math.prod(side or 0 for side in sides)), _element_bytes(types[0] if types else None)
    return 0, 4


def _element_bytes(name: object) -> int:
    """Returns the bytes of an element of a type as traces call it: "float", "Half", "c10::BFloat16"; 4 of one that torch has not."""
    found = getattr(torch, str(name).removeprefix("c10::").lower(), None)
    return found.itemsize if isinstance(found, torch.dtype) else 4


def _covered(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Returns how much of a stretch of time any span covers."""
    total, now = 0.0, begin
    for since, until in sorted(spans):
        since, until = max(since, now), min(until, end)
        if until > since:
            total, now = total + until - since, until
    return total


def _common(ones: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
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
    every = [{step.name: step for step in found} for found in ranks]
    names = [name for name in every[0] if all(name in one for one in every)]
    if not names:
        what = f"no step is in all traces: {', '.join(every[0])} and {', '.join(every[-1])}"
        raise ProfileError(what, where=shown(ranks[-1][0].path), do="profile the same steps on all ranks")
    seconds = {name: max(one[name].seconds for one in every) for name in names}
    middle = statistics.median_low(seconds.values())
    chosen = next(name for name in names if seconds[name] == middle)
    return [one[chosen] for one in every]


def travelling(ranks: Sequence[TracedSchedule]) -> list[float]:
    """Returns the seconds that each all-reduce of a step takes once all ranks are there."""
    first = ranks[0]
    for one in ranks[1:]:
        if [(sent.elements, sent.element_bytes) for sent in one.sent] != [
            (sent.elements, sent.element_bytes) for sent in first.sent
        ]:
            what = f"the ranks {first.rank} and {one.rank} send different gradients in {first.name}"
            raise ProfileError(what, where=f"{shown(first.path)} and {shown(one.path)}", do=_DO)
    return [min(sent.seconds for sent in same) for same in zip(*(one.sent for one in ranks), strict=True)]


def played_traces(traces: Mapping[str, Sequence[TracedSchedule]], cluster: Cluster | None = None) -> SimulatedStep:
    """Returns a step of the run that was traced; with a cluster, that step on its links, devices and numbers of them.

    Args:
        traces: steps of one rank by name; with a cluster, of one rank of each class of devices. A run that was traced on one rank alone
            is taken to be alike on all, and its all-reduces for as long as they seemed.
        cluster: what to replay them on; None for what was traced.
    """
    found = dict(zip(traces, common_step(list(traces.values())), strict=True))
    ranks = [one.rank for one in found.values()]
    if cluster is None and len(set(ranks)) != len(ranks):
        again = next(one for one in found.values() if ranks.count(one.rank) > 1)
        raise ProfileError(f"rank {again.rank} is there twice", where=shown(again.path), do=_DO)
    if cluster is None:
        (most, *others) = {one.ranks for one in found.values()}
        if others or len(found) not in (1, most):
            what = f"there are traces of {len(found)} ranks of {max(most, *others, 0)}"
            raise ProfileError(what, where=", ".join(shown(one.path) for one in found.values()), do=_DO)
        cluster = Cluster({name: ClusterDevice(count=most if len(found) == 1 else 1) for name in found})
        transfer = travelling(list(found.values())) if most > 1 else []
    else:
        travelling(list(found.values()))
        transfer = None
    count = len(next(iter(found.values())).sent) if cluster.ranks > 1 else 0
    schedules = {name: one.schedule for name, one in found.items()}
    return simulate(schedules, cluster, indices=[[at] for at in range(count)], transfer=transfer)
