"""When a cluster is to be planned for anew: what each rank has seen of late, and what all of them together make of it.

A rank compares the seconds that it computes with those that the plan foresees, and the memory that it may take with what the plan takes.
One step says nothing: it is a drift when all of the last `patience` steps lie on the same side, by more than `tolerance`. A class of
devices is as slow as the slowest of its ranks, as it was when it was planned for: it is slower where one rank is, and faster where all are.

Invariant: pure functions of what was measured. Ranks that are given the same statements decide the same, and between two decisions lie
`cooldown` steps.

The seconds that a rank computes itself in a step, without those in which it waits for others.

A pass of the model begins where what is compiled is called, and ends with the last gradient that autograd has made: after it,
DistributedDataParallel waits for the gradients of the others. The optimizer's step is added.

Invariant: hooks look at the clock and change nothing. Calls without gradients begin no pass, nor do those in a backward pass, which
compute anew what was not kept.
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
    """The context, around training; `begin` and `end` stand around the optimizer's step.

    Args:
        model: as it is called, or with what is compiled in it.
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
        """Notes that the optimizer's step begins."""
        self._close()
        self._optimizing = self._clock()

    def end(self) -> float | None:
        """Returns the seconds of one pass and the optimizer's step, as it ends; None where no pass was seen."""
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
    """
    Attributes:
        tolerance: what a step may take more than foreseen, or less, as a share: 0.15 for 15%.
        patience: how many steps in a row have to lie beyond it.
        cooldown: how many steps after a decision count for nothing.
        gain: what another plan has to win, of the seconds of a step or of the variance, to be worth compiling for.
        links: what an all-reduce may take more than foreseen, or less, as a share.
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
                    f"{name} is a number of steps from {least}, not {getattr(self, name)}"
                )
        for name in ("tolerance", "gain", "links"):
            if not getattr(self, name) >= 0:
                raise OptionError(
                    f"{name} is a share from 0, such as 0.15, and not {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Room:
    """Memory of a rank, in bytes.

    Attributes:
        allowed: what a step may take now, the parameters and all else that it holds included.
        needed: what the plan in force takes.
        planned: what it was allowed to take when it was made, where that was less than what the user allows; None else.
    """

    allowed: float
    needed: float
    planned: float | None = None


@dataclass(frozen=True)
class StepWindow:
    """What a rank has seen in its last steps.

    Attributes:
        paces: measured over foreseen seconds.
        rooms: memory; None where nothing is known of it.
        resting: how many steps are still to count for nothing.
    """

    paces: tuple[float, ...] = ()
    rooms: tuple[Room | None, ...] = ()
    resting: int = 0


@dataclass(frozen=True)
class Stated:
    """What a rank tells the others.

    Attributes:
        pace: measured over foreseen seconds, the median; None before there are enough steps.
        slower, faster: whether it lay beyond the tolerance in all steps.
        allowed: the least bytes that a step might take in these steps; None where nothing is known.
        tight, roomy: whether the plan took more than that in all steps, or was made for less though there was more in all of them.
    """

    pace: float | None = None
    slower: bool = False
    faster: bool = False
    allowed: float | None = None
    tight: bool = False
    roomy: bool = False


@dataclass(frozen=True)
class Drift:
    """Why to plan anew, and for what.

    Attributes:
        paces: of each class of which it is known, measured over foreseen seconds.
        allowed: of each class where memory counts, the bytes that a step may take.
        slower, faster, tight, roomy: the ranks that ask for it.
        links: measured over foreseen seconds of an all-reduce, where links have changed; None where they have not.
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
    """Returns what a rank has seen after one more step."""
    if observed.resting:
        return replace(observed, resting=observed.resting - 1)
    return StepWindow(
        (*observed.paces, pace)[-settings.patience :], (*observed.rooms, room)[-settings.patience :]
    )


def stated(observed: StepWindow, settings: Hysteresis) -> Stated:
    """Returns what a rank tells the others of it."""
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
    """Returns why the ranks are to be planned for anew; None where they are not.

    Args:
        everyones: what each rank states.
        classes: the class of each rank.
    """
    of: dict[str, list[int]] = {}
    for rank, name in enumerate(classes):
        of.setdefault(name, []).append(rank)

    def of_all(ask: str) -> tuple[int, ...]:
        """The ranks that ask for it, of classes in which all do: the slowest of a class speaks for it."""
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
    """Returns what links take, over what was foreseen, where they have changed; None where they have not.

    Args:
        ratios: measured over foreseen seconds, the last ones: once is chance, and as often as there are of these it is not.
    """
    changed = all(ratio > 1 + settings.links for ratio in ratios) or all(
        ratio < 1 / (1 + settings.links) for ratio in ratios
    )
    return statistics.median(ratios) if ratios and changed else None


def wins(before: tuple[float, float], after: tuple[float, float], fits: bool, gain: float) -> bool:
    """Whether another plan is worth compiling for.

    Args:
        before, after: seconds of a step and variance of the gradients, under the plan in force and under the other.
        fits: whether the plan in force keeps the limits of memory.
        gain: what the other has to win.
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
    """Returns for each class what is the worst of its ranks, as far as any of them knows."""
    available = {
        name: [value for rank in ranks if (value := values[rank]) is not None]
        for name, ranks in of.items()
    }
    return MappingProxyType({name: choose(item) for name, item in available.items() if item})
