"""Drift detection: when compute time or memory differs from the plan for many steps.

A rank compares its compute seconds and its available memory with the predictions of the plan. Drift
is reported if all of the last `patience` steps exceed `tolerance` in the same direction. A class is
as slow as its slowest rank: it is slower if one rank is, and faster only if all are. At least
`cooldown` steps separate two decisions.

Invariant: decisions are pure functions of measurements, so ranks with equal statements decide the
same. The timing hooks read the clock and change no value.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
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
        trained: list[Any] = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in trained:
            self._stack.callback(
                parameter.register_post_accumulate_grad_hook(self._gradient).remove
            )
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
        if (
            not (self._model.training and torch.is_grad_enabled())
            or torch._C._current_graph_task_id() != -1
        ):
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


@dataclass(frozen=True)
class Hysteresis:
    """Thresholds of drift detection and replanning.

    Attributes:
        tolerance: relative deviation of compute seconds or memory from the prediction: 0.15 for
            15%.
        patience: consecutive steps that must exceed it.
        cooldown: steps after a decision that are ignored.
        gain: relative improvement of step time or variance that justifies recompilation for another
            plan.
        links: relative deviation of an all-reduce from the prediction.
    """

    tolerance: float = 0.15
    patience: int = 20
    cooldown: int = 100
    gain: float = 0.02
    links: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("patience", 1), ("cooldown", 0)):
            if getattr(self, name) < least:
                raise OptionError(
                    f"{name} must be at least {least} steps, not {getattr(self, name)}"
                )
        for name in ("tolerance", "gain", "links"):
            if not getattr(self, name) >= 0:
                raise OptionError(
                    f"{name} must be a share of 0 or more, such as 0.15, not {getattr(self, name)}"
                )


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


@dataclass(frozen=True)
class Stated:
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

    paces: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    slower: tuple[int, ...] = ()
    faster: tuple[int, ...] = ()
    tight: tuple[int, ...] = ()
    roomy: tuple[int, ...] = ()
    links: float | None = None


def after_step(
    observed: StepWindow, pace: float, room: Room | None, settings: Hysteresis
) -> StepWindow:
    if observed.resting:
        return replace(observed, resting=observed.resting - 1)
    return StepWindow(
        (*observed.paces, pace)[-settings.patience :], (*observed.rooms, room)[-settings.patience :]
    )


def stated(observed: StepWindow, settings: Hysteresis) -> Stated:
    if len(observed.paces) < settings.patience:
        return Stated()
    rooms = [room for room in observed.rooms if room is not None]
    available = len(rooms) == len(observed.rooms)
    return Stated(
        statistics.median(observed.paces),
        all(pace > 1 + settings.tolerance for pace in observed.paces),
        all(pace < 1 / (1 + settings.tolerance) for pace in observed.paces),
        min(room.allowed for room in rooms) if available else None,
        available and all(room.allowed < room.needed for room in rooms),
        available
        and all(
            room.planned is not None and room.allowed > room.planned * (1 + settings.tolerance)
            for room in rooms
        ),
    )


def drift(everyones: Sequence[Stated], classes: Sequence[str]) -> Drift | None:
    """Return the reason for replanning; None without drift.

    Args:
        everyones: summary of each rank.
        classes: device class of each rank.
    """
    of: dict[str, list[int]] = {}
    for rank, name in enumerate(classes):
        of.setdefault(name, []).append(rank)

    def of_all(ask: str) -> tuple[int, ...]:
        """Return the ranks of classes in which all ranks have the change."""
        asking = [
            ranks for ranks in of.values() if all(getattr(everyones[rank], ask) for rank in ranks)
        ]
        return tuple(sorted(rank for ranks in asking for rank in ranks))

    def of_any(ask: str) -> tuple[int, ...]:
        return tuple(rank for rank, item in enumerate(everyones) if getattr(item, ask))

    result = Drift(
        _known(of, [item.pace for item in everyones], max),
        _known(of, [item.allowed for item in everyones], min),
        of_any("slower"),
        of_all("faster"),
        of_any("tight"),
        of_all("roomy"),
    )
    return result if result.slower or result.faster or result.tight or result.roomy else None


def link_drift(ratios: Sequence[float], settings: Hysteresis) -> float | None:
    """Return the median of `ratios` if all deviate in the same direction; None otherwise.

    Args:
        ratios: last measured over predicted seconds of an all-reduce; several, to exclude noise.
    """
    changed = all(ratio > 1 + settings.links for ratio in ratios) or all(
        ratio < 1 / (1 + settings.links) for ratio in ratios
    )
    return statistics.median(ratios) if ratios and changed else None


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


def _known(
    of: Mapping[str, Sequence[int]],
    values: Sequence[float | None],
    choose: Callable[[list[float]], float],
) -> Mapping[str, float]:
    """Return the worst value of each class's ranks, for classes with a known value."""
    available = {
        name: [value for rank in ranks if (value := values[rank]) is not None]
        for name, ranks in of.items()
    }
    return MappingProxyType({name: choose(item) for name, item in available.items() if item})
