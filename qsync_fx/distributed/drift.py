"""Drift detection: when compute time, memory or links differ from the plan for many steps.

A class of devices is slower if one rank is, and faster only if all are. All ranks time one exchange
with the transport of compressed gradients together, between steps, so that a late rank is not
mistaken for a slow link.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import distributed, nn

from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.control_group import CPU
from qsync_fx.devices.roofline import share
from qsync_fx.distributed.node_topology import measured
from qsync_fx.errors import OptionError
from qsync_fx.plan_switching import when_called
from qsync_fx.predictor.replayer.cluster import TRANSPORTS, Cluster, Exchange, Transport
from qsync_fx.profiler.links.collective_times import all_reduce_seconds
from qsync_fx.profiler.links.exchange_times import exchange_seconds
from qsync_fx.torch_internals import _current_graph_task_id

Clock = Callable[[], float]
_NOTE: Final = "link"
_OUGHT: Final = 0.01  # minimum seconds of the probe, well above clock and scheduler noise
_LONGEST: Final = 0.5  # seconds above which the probe uses fewer bytes
_LATENCIES: Final = 3
_REPEATS: Final = 3
_SIZES: Final = tuple(2**power for power in range(12, 27, 2))
_SMALLEST: Final = 2**10
_IN_A_ROW: Final = 2


class Pace:
    """Timer of this rank's compute seconds per step, without waiting for other ranks.

    A pass starts at the call of a compiled region and ends with the last gradient of autograd. Call
    `begin` and `end` around the optimizer step, which is added.
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
        if not passes:
            return None
        self._passes = []
        return statistics.fmean(passes) + took

    def _called(self) -> None:
        # A call inside a backward pass recomputes activations.
        recomputes = _current_graph_task_id() != -1
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
        tolerance: relative deviation of compute seconds or memory from the prediction.
        patience: consecutive steps that must exceed it.
        cooldown: steps after a decision that are ignored.
        gain: relative improvement of step time or variance that justifies recompilation.
        links: relative deviation of an exchange from the prediction, in two consecutive probes
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
    """Memory of a rank, in bytes."""

    allowed: float  # what a step may use now, parameters included
    needed: float  # predicted peak memory of the active plan
    planned: float | None = None  # limit that the plan was solved for, if less than the user's


@dataclass(frozen=True)
class StepWindow:
    """Observations of a rank in its last steps."""

    paces: tuple[float, ...] = ()  # measured over predicted seconds
    rooms: tuple[Room | None, ...] = ()
    resting: int = 0  # steps that are still ignored

    def after_step(self, pace: float, room: Room | None, patience: int) -> StepWindow:
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
    """Summary of a rank's window, sent to the other ranks."""

    pace: float | None = None  # median of measured over predicted seconds
    slower: bool = False  # whether all steps exceed the tolerance
    faster: bool = False  # whether all steps exceed the tolerance
    allowed: float | None = None  # minimum of the bytes that a step may use
    tight: bool = False  # whether the plan needs more than allowed in all steps
    roomy: bool = False  # whether all steps have more memory than the plan was solved for
    position: tuple[int, int] = (0, 0)  # epoch and step of the next batch of the rank's sampler


@dataclass(frozen=True)
class Drift:
    """Reason for replanning: classes with changed speed or memory, and ranks with each change."""

    paces: Mapping[str, float] = field(default_factory=dict)  # measured over predicted seconds
    allowed: Mapping[str, float] = field(default_factory=dict)  # bytes that a step may use
    slower: tuple[int, ...] = ()
    faster: tuple[int, ...] = ()
    tight: tuple[int, ...] = ()
    roomy: tuple[int, ...] = ()
    links: float | None = None  # measured over predicted seconds of an exchange


def drift(everyones: Sequence[WindowSummary], classes: Sequence[str]) -> Drift | None:
    """Return the reason for replanning, from the summary and device class of each rank."""
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
    """Return the median of measured over predicted seconds if all deviate in one direction."""
    limit = 1 + settings.links
    if not ratios or (min(ratios) <= limit and max(ratios) >= 1 / limit):
        return None
    return statistics.median(ratios)


def wins(before: tuple[float, float], after: tuple[float, float], fits: bool, gain: float) -> bool:
    """Return whether a plan with (step seconds, variance) `after` gains at least the share `gain`.

    If the active plan does not fit the memory limits, any other plan does.
    """
    (old_seconds, old_variance), (seconds, variance) = before, after
    if not fits or seconds < old_seconds * (1 - gain):
        return True
    return variance < old_variance * (1 - gain) and seconds <= old_seconds * (1 + gain)


@dataclass(frozen=True)
class LinkProbe:
    """Phase of an exchange between all ranks, as of compressed gradients.

    Attributes:
        nbytes: bytes that a rank sends to all others together; 0 if there is no traffic.
        seconds: predicted duration.
        transport: transport of the messages.
    """

    nbytes: int = 0
    seconds: float = 0.0
    transport: Transport = "point_to_point"

    @classmethod
    def of(cls, cluster: Cluster) -> LinkProbe:
        """Return a probe that is sensitive to the bandwidth of a cluster, not to latency."""
        ranks = cluster.ranks
        if ranks == 1:
            return cls()
        contributed = [size / share(ranks) for size in _SIZES]
        seconds = cluster.flat_exchange.seconds(contributed, ranks, phases=1).tolist()
        pairs = zip(_SIZES, seconds, strict=True)
        probes = [cls(size, duration, cluster.transport) for size, duration in pairs]
        least = max(_OUGHT, _LATENCIES * seconds[0])
        return next((probe for probe in probes if probe.seconds >= least), probes[-1])

    @classmethod
    def noted(cls, notes: Mapping[str, str]) -> LinkProbe | None:
        """Return the probe in the notes of a plan; None without one."""
        if _NOTE not in notes:
            return None
        nbytes, seconds, transport = notes[_NOTE].split()
        name = next(name for name in TRANSPORTS if name == transport)
        return cls(int(nbytes), float(seconds), name)

    def notes(self) -> dict[str, str]:
        if not self.nbytes:
            return {}
        return {_NOTE: f"{self.nbytes} {self.seconds:.6g} {self.transport}"}


@dataclass(frozen=True)
class LinkTimes:
    """Durations of collectives between all ranks under current conditions.

    Attributes:
        all_reduce: pairs of bytes and seconds of DistributedDataParallel's all-reduce.
        exchanges: exchanges of compressed gradients.
    """

    all_reduce: Sequence[tuple[int, float]]
    exchanges: Sequence[Exchange]


class ProbedLinks:
    """Link monitor of one training, on one rank; `probe` is None if the plan has none."""

    def __init__(
        self, notes: Mapping[str, str], settings: Hysteresis, device: torch.device = CPU
    ) -> None:
        self._settings, self._device = settings, device
        self._resting, self._ratios = 0, list[float]()
        self.probe = LinkProbe.noted(notes)

    def look(self) -> float | None:
        """Measure on all ranks, every `patience` steps; return the drift, if any."""
        if self.probe is None:
            return None
        if self._resting > 0:
            self._resting -= self._settings.patience
            return None
        seconds = self._exchange(self.probe.nbytes, self.probe.transport)
        self._ratios = [*self._ratios, seconds / self.probe.seconds][-_IN_A_ROW:]
        if len(self._ratios) < _IN_A_ROW:
            return None
        return link_drift(self._ratios, self._settings)

    def decided(self, ratio: float | None) -> None:
        """Start the cooldown after a decision; scale the prediction by `ratio` if links changed."""
        self._resting, self._ratios = self._settings.cooldown, []
        if self.probe is not None and ratio is not None:
            nbytes, seconds = self.probe.nbytes, self.probe.seconds * ratio
            while seconds > _LONGEST and nbytes > _SIZES[0]:
                nbytes, seconds = nbytes // 4, seconds / 4
            self.probe = replace(self.probe, nbytes=nbytes, seconds=seconds)

    def times(self, nodes: NodeGroups | None = None) -> LinkTimes | None:
        """Measure collectives up to the size of the probe, on all ranks; None without a probe.

        With `nodes`, exchanges inside and between them are measured, too.
        """
        if self.probe is None:
            return None
        sizes = [size for size in (_SMALLEST, *_SIZES) if size <= self.probe.nbytes]
        reduced = [(size, all_reduce_seconds(size, _REPEATS, self._device)) for size in sizes]
        transport = self.probe.transport
        sent = [(float(size), self._exchange(size, transport)) for size in sizes]
        result = [Exchange(transport, "all", distributed.get_world_size(), sent)]
        if nodes is not None:
            limits: dict[str, Any] = {"transports": [transport], "largest": self.probe.nbytes}
            result += measured(nodes, self._device, **limits)
        return LinkTimes(reduced, result)

    def _exchange(self, nbytes: int, transport: Transport) -> float:
        return exchange_seconds(transport, nbytes, _REPEATS, self._device)
