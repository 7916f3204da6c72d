"""Drift detection: when compute time or memory differs from the plan for many steps.

A rank compares its compute seconds and its available memory with the predictions of the plan. Drift
is reported if all of the last `patience` steps exceed `tolerance` in the same direction. A class is
as slow as its slowest rank: it is slower if one rank is, and faster only if all are. Invariant:
decisions are pure functions of measurements, so ranks with equal statements decide the same.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qsync_fx.errors import OptionError
from qsync_fx.plan_switching import when_called

Clock = Callable[[], float]


class Pace:
    """Timer of this rank's compute seconds per step, without waiting for other ranks.

    A pass starts at the call of a compiled region and ends with the last gradient of autograd,
    before DistributedDataParallel waits for others; the optimizer step is added. Calls without
    gradients and calls inside a backward pass (recomputation) start no pass. Call `begin` and `end`
    around the optimizer step.

    Args:
        model: the module that is called, or one that contains compiled modules.
        clock: in seconds.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._began: float | None = None
        self._last: float | None = None
        self._passes: list[float] = []
        self._optimizing = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pace:
        self._stack.callback(when_called(self._model, self._called))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                handle = hooked.register_post_accumulate_grad_hook(self._gradient)
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        self._close()
        self._optimizing = self._clock()

    def end(self) -> float | None:
        """Return the mean seconds per pass plus the optimizer step; None without a pass."""
        took, passes = self._clock() - self._optimizing, self._passes
        self._passes = []
        return statistics.fmean(passes) + took if passes else None

    def _called(self) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        if not (self._model.training and torch.is_grad_enabled()) or recomputes:
            return
        if self._last is not None:
            self._close()
        if self._began is None:
            self._began = self._clock()

    def _gradient(self, _: Any) -> None:
        self._last = self._clock()

    def _close(self) -> None:
        if self._began is not None and self._last is not None:
            self._passes.append(self._last - self._began)
        self._began = self._last = None


@dataclass(frozen=True, kw_only=True)
class Hysteresis:
    """Thresholds of drift detection and replanning.

    Attributes:
        tolerance: relative deviation of compute seconds or memory from the prediction: 0.15 for
            15%.
        patience: consecutive steps that must exceed it.
        cooldown: steps after a decision that are ignored.
        gain: relative improvement of step time or variance that justifies recompilation for another
            plan.
        links: relative deviation of an all-reduce from the prediction, in two consecutive probes
            that are `patience` steps apart; for plans with codecs.
    """

    tolerance: float = 0.15
    patience: int = 20
    cooldown: int = 100
    gain: float = 0.02
    links: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("patience", 1), ("cooldown", 0)):
            if (value := getattr(self, name)) < least:
                raise OptionError(f"{name} must be at least {least} steps, not {value}")
        for name in ("tolerance", "gain", "links"):
            if not (value := getattr(self, name)) >= 0:
                raise OptionError(f"{name} must be a share of 0 or more, such as 0.15, not {value}")


@dataclass(frozen=True)
class Room:
    """Memory of a rank, in bytes.

    Attributes:
        allowed: bytes that a step may use now, parameters included.
        needed: predicted peak memory of the active plan.
        planned: limit that the active plan was solved for, if less than the user's limit; None
            otherwise.
    """

    allowed: float
    needed: float
    planned: float | None = None


@dataclass(frozen=True)
class StepWindow:
    """Observations of a rank in its last steps.

    Attributes:
        paces: measured over predicted seconds.
        rooms: memory; None if unknown.
        resting: steps that are still ignored.
    """

    paces: tuple[float, ...] = ()
    rooms: tuple[Room | None, ...] = ()
    resting: int = 0

    def after_step(self, pace: float, room: Room | None, patience: int) -> StepWindow:
        """Return the window of the last `patience` steps after another one."""
        if self.resting:
            return replace(self, resting=self.resting - 1)
        paces, rooms = (*self.paces, pace), (*self.rooms, room)
        return StepWindow(paces[-patience:], rooms[-patience:])

    def summary(self, settings: Hysteresis) -> WindowSummary:
        if len(self.paces) < settings.patience:
            return WindowSummary()
        limit, rooms = 1 + settings.tolerance, [room for room in self.rooms if room is not None]
        summary = WindowSummary(
            pace=statistics.median(self.paces),
            slower=min(self.paces) > limit,
            faster=max(self.paces) < 1 / limit,
        )
        if len(rooms) < len(self.rooms):
            return summary
        return replace(
            summary,
            allowed=min(room.allowed for room in rooms),
            tight=all(room.allowed < room.needed for room in rooms),
            roomy=all(
                room.planned is not None and room.allowed > room.planned * limit for room in rooms
            ),
        )


@dataclass(frozen=True)
class WindowSummary:
    """Summary of a rank's window, sent to the other ranks.

    Attributes:
        pace: median of measured over predicted seconds; None before there are enough steps.
        slower, faster: whether all steps exceed the tolerance.
        allowed: minimum of the bytes that a step may use; None if unknown.
        tight: whether the plan needs more than allowed in all steps.
        roomy: whether the plan was solved for less memory than is available in all steps.
    """

    pace: float | None = None
    slower: bool = False
    faster: bool = False
    allowed: float | None = None
    tight: bool = False
    roomy: bool = False


@dataclass(frozen=True)
class Drift:
    """Reason for replanning, and the changed properties of the cluster.

    Attributes:
        paces: measured over predicted seconds, by class, if known.
        allowed: bytes that a step may use, by class, if known.
        slower, faster, tight, roomy: ranks with this change.
        links: measured over predicted seconds of an all-reduce; None without a change.
    """

    paces: Mapping[str, float] = field(default_factory=dict)
    allowed: Mapping[str, float] = field(default_factory=dict)
    slower: tuple[int, ...] = ()
    faster: tuple[int, ...] = ()
    tight: tuple[int, ...] = ()
    roomy: tuple[int, ...] = ()
    links: float | None = None


def drift(everyones: Sequence[WindowSummary], classes: Sequence[str]) -> Drift | None:
    """Return the reason for replanning; None without drift.

    Args:
        everyones: summary of each rank.
        classes: device class of each rank.
    """
    by_class: dict[str, list[WindowSummary]] = {}
    for name, summary in zip(classes, everyones, strict=True):
        by_class.setdefault(name, []).append(summary)
    paces, allowed = {}, {}
    for name, summaries in by_class.items():
        if values := [item.pace for item in summaries if item.pace is not None]:
            paces[name] = max(values)
        if values := [item.allowed for item in summaries if item.allowed is not None]:
            allowed[name] = min(values)

    def ranks(change: str, of_all: bool) -> tuple[int, ...]:
        """Return the ranks with a change; `of_all` if all ranks of their class must have it."""
        return tuple(
            rank
            for rank, (name, summary) in enumerate(zip(classes, everyones, strict=True))
            if getattr(summary, change)
            and (not of_all or all(getattr(item, change) for item in by_class[name]))
        )

    slower, tight = ranks("slower", of_all=False), ranks("tight", of_all=False)
    faster, roomy = ranks("faster", of_all=True), ranks("roomy", of_all=True)
    if not (slower or faster or tight or roomy):
        return None
    return Drift(paces, allowed, slower, faster, tight, roomy)


def link_drift(ratios: Sequence[float], settings: Hysteresis) -> float | None:
    """Return the median of `ratios` if all deviate in the same direction; None otherwise.

    Args:
        ratios: last measured over predicted seconds of an all-reduce; several, to exclude noise.
    """
    limit = 1 + settings.links
    if not ratios or (min(ratios) <= limit and max(ratios) >= 1 / limit):
        return None
    return statistics.median(ratios)


def wins(before: tuple[float, float], after: tuple[float, float], fits: bool, gain: float) -> bool:
    """Return whether another plan is worth compiling for.

    Args:
        before, after: (step seconds, gradient variance) under the active plan and the other plan.
        fits: whether the active plan satisfies the memory limits.
        gain: relative improvement that the other plan must reach.
    """
    (old_seconds, old_variance), (seconds, variance) = before, after
    if not fits or seconds < old_seconds * (1 - gain):
        return True
    return variance < old_variance * (1 - gain) and seconds <= old_seconds * (1 + gain)
