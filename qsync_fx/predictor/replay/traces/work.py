"""What was done in a trace, of a host or a device, and which gradients travelled.

On a CPU work is what operators do that no other operator called; on a GPU it is kernels, and copies, of all streams but those of
collectives, and belongs to the operator that asked for it. Operators are called by their name and which one of that name in the step it is;
their backward passes by the number that autograd gave to both.

Invariant: work is in the order in which it began.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.predictor.replay.traces.kineto import Event, outermost
from qsync_fx.predictor.schedule import Part

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
class Work:
    """A piece of work: when the host began it or asked for it, and when it ran; seconds."""

    name: str
    part: Part | None
    asked: float
    begin: float
    end: float


def work_of(events: Sequence[Event]) -> tuple[bool, list[Work], list[Travel]]:
    """Returns whether a device did the work, the work, and the all-reduces."""
    calls = outermost([event for event in events if event.category == "cpu_op"])
    if any(event.category in _ON_DEVICE for event in events):
        return True, _of_device(events, calls), _sent_by_device(events)
    return False, _of_host(events, calls), _sent_by_host(events)


def _of_host(events: Sequence[Event], calls: Sequence[Event]) -> list[Work]:
    optimizer, names = _optimizers(events), _names(events, calls)
    return [
        Work(names.get(id(call), call.name), _part(call.name, call.begin, optimizer), call.begin, call.begin, call.end)
        for call in calls
    ]


def _of_device(events: Sequence[Event], calls: Sequence[Event]) -> list[Work]:
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
        work.append(Work(name, part, asker.begin, event.begin, event.end))
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
