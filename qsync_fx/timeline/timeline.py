"""A replayed step, as users look at it.

Invariant: of each device, forward and backward pass, casts and the rest, waiting, sending and the optimizer add up to the step, but for
what the host takes to hand work over and what communication slows down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from qsync_fx.codec import Path
from qsync_fx.predictor.replay.fleet import Bucket, Played
from qsync_fx.predictor.schedule import Part


@dataclass(frozen=True)
class OperatorSeconds:
    """What an operator takes of a step of one device.

    Attributes:
        device: the class of devices.
        operator: its id; "" for what belongs to none.
        forward, backward: seconds of the operator itself.
        casts: seconds of conversions and quantizers in front of it, and of what differentiates them.
        other: seconds of the framework.
    """

    device: str
    operator: str
    forward: float = 0.0
    backward: float = 0.0
    casts: float = 0.0
    other: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.casts + self.other


@dataclass(frozen=True)
class Piece:
    """A stretch of time on a track of a device.

    Attributes:
        name: what happens.
        kind: "forward", "backward", "cast", "outside", "optimizer", "waiting" or "sending".
        begin, end: seconds.
    """

    name: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """
    Attributes:
        played: what was replayed.
        peak_bytes: by class of devices, what a step holds at most, as `qsync_fx.predictor.memory` foresees it from the model and the plan
            alone, uncorrected by what a profile measured (docs/predictor.md says how near); empty while that is not known.
        conditions: by class of devices, in words, what was not as by default when its profile was taken: options of the backend, and
            modules in the mode to evaluate. Times hold under these conditions alone.
    """

    played: Played
    peak_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    conditions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def seconds(self) -> float:
        """Seconds from one step to the next."""
        return float(self.played.step.seconds)

    @property
    def throughput(self) -> float | None:
        """Samples a second of the whole cluster; None where the batch of a device is not known."""
        devices = self.played.cluster.devices.values()
        batches = [one.batch * one.count for one in devices if one.batch is not None]
        return sum(batches) / self.seconds if len(batches) == len(devices) and self.seconds else None

    @property
    def waiting(self) -> Mapping[str, float]:
        """Seconds of a step in which a device of each class does nothing because others are not ready to send."""
        return self._standing("waiting")

    @property
    def sending(self) -> Mapping[str, float]:
        """Seconds of a step in which a device of each class does nothing because gradients travel."""
        return self._standing("sending")

    def by_operator(self) -> tuple[OperatorSeconds, ...]:
        """Returns what each operator takes on each class of devices, the longest first."""
        found: list[OperatorSeconds] = []
        for device, alone in self.played.devices.items():
            sums: dict[str, dict[Part, float]] = {}
            for entry, seconds in zip(alone.entries, alone.seconds.tolist(), strict=True):
                parts = sums.setdefault(entry.operator, {})
                parts[entry.part] = parts.get(entry.part, 0.0) + seconds
            found += [
                OperatorSeconds(device, operator, *(parts.get(part, 0.0) for part in Part))
                for operator, parts in sums.items()
            ]
        return tuple(sorted(found, key=lambda one: -one.seconds))

    @cached_property
    def computing(self) -> Mapping[str, tuple[Piece, ...]]:
        """What the stream of computation of each class does, in order, waiting included."""
        return {name: tuple(self._computing(at, name)) for at, name in enumerate(self.played.devices)}

    @cached_property
    def communicating(self) -> Mapping[str, tuple[Piece, ...]]:
        """What the stream of communication of each class does, in order, waiting included."""
        return {name: tuple(self._communicating(at)) for at, name in enumerate(self.played.devices)}

    def save_perfetto(self, path: Path) -> None:
        """Writes the timeline for ui.perfetto.dev and chrome://tracing; raises `ProfileError` if it cannot."""
        from qsync_fx.report.perfetto import save

        save(self, path)

    def __repr__(self) -> str:
        """One line, as notebooks and debuggers show it."""
        from qsync_fx.report.numbers import duration

        devices = ", ".join(f"{device.count} {name}" for name, device in self.played.cluster.devices.items())
        return f"Timeline({duration(self.seconds)} a step on {devices})"

    def __str__(self) -> str:
        from qsync_fx.report.timeline_text import timeline_text

        return timeline_text(self)

    def _standing(self, kind: str) -> Mapping[str, float]:
        return {
            name: sum((piece.end - piece.begin for piece in pieces if piece.kind == kind), 0.0)
            for name, pieces in self.computing.items()
        }

    def _computing(self, at: int, name: str) -> list[Piece]:
        alone, step = self.played.devices[name], self.played.step
        begin, end = (step.moments(at, clock).tolist() for clock in (alone.ends - alone.seconds, alone.ends))
        pieces = [
            Piece(entry.operator or _WITHOUT[entry.part], str(entry.part), since, until)
            for entry, since, until in zip(alone.entries, begin, end, strict=True)
        ]
        last = float(step.computed[at])
        for bucket, sent, arrived in zip(self.played.buckets, step.sent.tolist(), step.arrived.tolist(), strict=True):
            if sent > last:
                pieces.append(Piece("waiting for others", "waiting", last, sent))
            if arrived > max(sent, last):
                pieces.append(Piece(f"waiting for {_name(bucket)}", "sending", max(sent, last), arrived))
            last = max(last, arrived)
        copied = self.played.returned(name)
        if copied:
            pieces.append(Piece("gradients out of their buckets", "outside", last, last + copied))
        return [*pieces, Piece("optimizer", "optimizer", last + copied, last + copied + alone.optimizer)]

    def _communicating(self, at: int) -> list[Piece]:
        step, pieces, last = self.played.step, [], 0.0
        moments = zip(step.ready[at].tolist(), step.sent.tolist(), step.arrived.tolist(), strict=True)
        for bucket, (ready, sent, arrived) in zip(self.played.buckets, moments, strict=True):
            if sent > max(ready, last):
                pieces.append(Piece("waiting for others", "waiting", max(ready, last), sent))
            pieces.append(Piece(_name(bucket), "sending", sent, arrived))
            last = arrived
        return pieces


_WITHOUT = {Part.FORWARD: "forward", Part.BACKWARD: "backward", Part.CAST: "cast", Part.OUTSIDE: "framework"}


def _name(bucket: Bucket) -> str:
    more = len(bucket.parameters) - 1
    return f"{bucket.parameters[0]}{f' and {more} more' if more else ''}"
