"""Schedules of the steps in a trace.

What stands still between two pieces of work is the framework's: so a schedule takes as long as its step did. After the
backward pass everything counts as the optimizer, but for waiting until gradients have arrived.

Each all-reduce stands for one parameter, the gradients of a bucket, which is ready once the work is done that was begun before the
all-reduce was asked for.

Invariant: forward pass, backward pass, optimizer and waiting add up to the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replay.traces.file import number
from qsync_fx.predictor.replay.traces.kineto import Event, Kineto
from qsync_fx.predictor.replay.traces.work import Travel, Work, work_of
from qsync_fx.predictor.schedule import Entry, Parameter, Part, Schedule


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
class Traced:
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


def steps(trace: Kineto, sizes: Mapping[int, tuple[int, int]] | None = None) -> list[Traced]:
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
    work: Sequence[Work],
    travelled: Sequence[Travel],
    sizes: Mapping[int, tuple[int, int]],
) -> Traced:
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
    return Traced(trace.path, trace.rank, trace.ranks, name, end - begin, schedule, sent)


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
