"""The global data flow graph: steps of several devices, joined by the buckets that all of them send.

A bucket starts to travel once it is ready on all devices and the bucket before it has arrived (QSync, equation (6)). While one travels,
devices compute slower, and while any device computes, buckets travel slower: both share memory and, on a CPU, cores. The optimizer runs
once everything has arrived.

Without slowing down that is `closed_form`. With it, one turn a bucket: all earlier transfers are known when a bucket becomes ready, so
a device's own clock, which runs slower during them, tells when that is.

Invariant: arrays may have axes of plans in front; then devices, then buckets.

Two streams of work that wait for one another, without a simulation.

Where the n-th piece of a stream starts once it is ready and the piece before it has ended, the ends are

    end[n] = max over m <= n of (ready[m] + seconds[m] + ... + seconds[n])

which is the sum of all seconds so far and the running maximum of how late each piece was: equation (6) of QSync for buckets that travel
one after the other, and the same for kernels that a device runs as the host hands them over.

Invariant: arrays may have any axes in front, of plans and of devices; the last one is that of pieces.

The local data flow graph: when one device has done what, of a step that it is alone with.

A device does what its schedule says in order, each entry once the host has handed it over. The gradients of a bucket are whole after some
entry; DDP hands buckets over in order, so a bucket is ready once it and all before it are whole. Compressing them is work of the device.

Invariant: seconds count from the moment at which the device begins its step, at its full speed: what it waits for others, and what
communication slows down, is `step`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    # The link times of a cluster file are read without torch.
    from qsync_fx.predictor.times import Entry, Schedule

Array = NDArray[Any]


def ends(ready: Array, seconds: Array) -> Array:
    """Returns when each piece ends, of those that are ready at `ready` and take `seconds`."""
    total = np.cumsum(seconds, axis=-1)
    late: Array = ready - (total - seconds)
    np.maximum.accumulate(late, axis=-1, out=late)
    late += total
    return late


def last_end(ready: Array, seconds: Array) -> Array:
    """Returns when the last of at least one piece ends; quicker than all ends."""
    rest = np.cumsum(seconds[..., ::-1], axis=-1)[..., ::-1]
    latest: Array = (ready + rest).max(axis=-1)
    return latest


def iteration(ready: Array, transfer: Array, computed: Array, optimizer: Array) -> Array:
    """Returns the seconds of the steps of a run, of many plans at once, where communication and computation do not slow one another down.

    Equation (6) takes the latest device for each bucket, then the latest bucket. Both are maxima, so the order does not matter: the run is
    as fast as the slowest of its devices would be if it never waited for another, transfers included.

    Args:
        ready: (..., devices, buckets), when each bucket is ready, counted from where the device begins its step.
        transfer: (..., buckets), seconds that each travels.
        computed: (..., devices), when each device has done its backward pass.
        optimizer: (..., devices), seconds of its optimizer, and of whatever keeps it from beginning the next step.
    """
    arrived = last_end(ready, transfer[..., None, :])
    longest: Array = (np.maximum(arrived, computed) + optimizer).max(axis=-1)
    return longest


@dataclass(frozen=True)
class Overlap:
    """How communication and computation slow one another down.

    Attributes:
        compute: what a device takes longer while a bucket travels; 0.1 for a tenth.
        transfer: what a bucket takes longer while any device computes.
    """

    compute: float = 0.0
    transfer: float = 0.0


NONE: Final = Overlap()


@dataclass(frozen=True)
class DeviceStep:
    """
    Attributes:
        begins: (..., devices), when each device begins its step.
        ready: (..., devices, buckets), when each bucket is ready on each device.
        sent: (..., buckets), when each begins to travel.
        arrived: (..., buckets), when it has arrived.
        computed: (..., devices), when each device has done its backward pass.
        done: (..., devices), when it has done its optimizer's step and can begin the next one.
        slowed: how much longer devices took while a bucket travelled.
    """

    begins: Array
    ready: Array
    sent: Array
    arrived: Array
    computed: Array
    done: Array
    slowed: float = 0.0

    @property
    def seconds(self) -> Array:
        """How much later the next step begins."""
        longest: Array = (self.done - self.begins).max(axis=-1)
        return longest

    def moments(self, device: int, clock: Array) -> Array:
        """Returns when the own clock of a device shows these times, of one plan."""
        begins, used = self.begins[device : device + 1], self.arrived - self.sent
        clocks = _clocks(self.sent, used, begins, self.slowed)
        moments: Array = _moments(clock[None], begins, clocks, used, self.slowed)[0]
        return moments


def step(
    ready: Array,
    computed: Array,
    optimizer: Array,
    transfer: Array,
    begins: Array,
    overlap: Overlap = NONE,
) -> DeviceStep:
    """Returns a step of devices that begin it at `begins`.

    Args:
        ready: (..., devices, buckets), when each bucket is ready by the device's own clock.
        computed: (..., devices), when the backward pass is done, likewise.
        optimizer: (..., devices), seconds of the optimizer, and of whatever else keeps the device from its next step.
        transfer: (..., buckets), seconds that each bucket travels.
        begins: (..., devices).
        overlap: how communication and computation slow one another down.
    """
    if overlap == NONE:
        ready, computed = ready + begins[..., None], computed + begins
        arrived = ends(ready.max(axis=-2), transfer)
        sent = arrived - transfer
    else:
        ready, sent, arrived, computed = _slowed(ready, computed, transfer, begins, overlap)
    synchronized = np.maximum(arrived[..., -1:], computed) if arrived.shape[-1] else computed
    return DeviceStep(
        begins, ready, sent, arrived, computed, synchronized + optimizer, overlap.compute
    )


def steady(
    ready: Array, computed: Array, optimizer: Array, transfer: Array, overlap: Overlap = NONE
) -> DeviceStep:
    """Returns a step as those before and after it: each device begins it when it was done with the last one.

    A device whose optimizer is quick begins before others, so the first step of a run, which all begin at once, takes longer. The
    arguments are those of `step`.
    """
    begins = optimizer - optimizer.min(axis=-1, keepdims=True)
    for _ in range(_TURNS):
        result = step(ready, computed, optimizer, transfer, begins, overlap)
        following = result.done - result.done.min(axis=-1, keepdims=True)
        if (
            not transfer.shape[-1]
            or np.abs(following - begins).max() <= _SAME * np.abs(result.seconds).max()
        ):
            break
        begins = following
    return result


_TURNS: Final = 64
_SAME: Final = 1e-12


def _slowed(
    ready: Array, computed: Array, transfer: Array, begins: Array, overlap: Overlap
) -> tuple[Array, Array, Array, Array]:
    """Returns when buckets are ready, are sent and arrive, and when devices have computed."""
    transfer = np.broadcast_to(transfer, (*ready.shape[:-2], ready.shape[-1]))
    moments, sent, used = np.empty_like(ready), np.zeros_like(transfer), np.zeros_like(transfer)
    free = np.zeros(transfer.shape[:-1])
    for index in range(transfer.shape[-1]):
        before = slice(0, index)
        clocks = _clocks(sent[..., before], used[..., before], begins, overlap.compute)
        item = ready[..., index : index + 1]
        moments[..., index] = _moments(item, begins, clocks, used[..., before], overlap.compute)[
            ..., 0
        ]
        sent[..., index] = np.maximum(moments[..., index].max(axis=-1), free)
        clock = _clocks(sent[..., : index + 1], used[..., : index + 1], begins, overlap.compute)[
            ..., -1
        ]
        left = np.maximum(computed - clock, 0).max(axis=-1) * (1 + overlap.compute)
        neighbours = np.minimum(left, transfer[..., index] * (1 + overlap.transfer))
        used[..., index] = transfer[..., index] + neighbours * overlap.transfer / (
            1 + overlap.transfer
        )
        free = sent[..., index] + used[..., index]
    clocks = _clocks(sent, used, begins, overlap.compute)
    computed = _moments(computed[..., None], begins, clocks, used, overlap.compute)[..., 0]
    return moments, sent, sent + used, computed


def _clocks(sent: Array, used: Array, begins: Array, slowed: float) -> Array:
    """Returns what each device's own clock shows when each bucket is sent (..., devices, buckets)."""
    lost = (np.cumsum(used, axis=-1) - used) * slowed / (1 + slowed)
    return (sent - lost)[..., None, :] - begins[..., None]


def _moments(clock: Array, begins: Array, clocks: Array, used: Array, slowed: float) -> Array:
    """Returns when own clocks show times (..., devices, times), of devices whose clocks show `clocks` when buckets are sent."""
    plain: Array = begins[..., None] + clock
    if not slowed:
        return plain
    shown = (used / (1 + slowed))[..., None, None, :]
    neighbours = np.clip(clock[..., :, None] - clocks[..., None, :], 0, shown)
    plain += slowed * neighbours.sum(axis=-1)
    return plain


@dataclass(frozen=True)
class Local:
    """
    Attributes:
        entries: what the device does, in order.
        seconds: (entries,), how long each takes.
        ends: (entries,), when it has done each.
        ready: (buckets,), when each bucket can be sent.
        optimizer: seconds of the optimizer's step.
    """

    entries: tuple[Entry, ...]
    seconds: Array
    ends: Array
    ready: Array
    optimizer: float

    @property
    def computed(self) -> float:
        """When the backward pass is done."""
        return float(self.ends[-1]) if len(self.ends) else 0.0


def arrival(schedule: Schedule) -> list[int]:
    """Returns the parameters in the order in which their gradients are whole; of those at once, the last registered first."""
    index = {parameter.path: number for number, parameter in enumerate(schedule.parameters)}
    return sorted(
        (index[path] for path in schedule.ready),
        key=lambda n: (schedule.ready[schedule.parameters[n].path], -n),
    )


def done_after(schedule: Schedule, buckets: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each bucket how many entries of forward and backward pass are done once it and those before it are whole."""
    paths = [parameter.path for parameter in schedule.parameters]
    done, result = 0, []
    for bucket in buckets:
        # What gets no gradient travels as zeros, which are there from the start.
        full = (schedule.ready.get(paths[index], -1) for index in bucket)
        done = max(done, len(schedule.forward) + 1 + max(full, default=-1))
        result.append(done)
    return result


def local(
    schedule: Schedule,
    buckets: Sequence[Sequence[int]] = (),
    *,
    slowdown: float = 1.0,
    launch: float = 0.0,
    extra: Mapping[int, Entry] = MappingProxyType({}),
    neighbours: Mapping[int, Entry] = MappingProxyType({}),
) -> Local:
    """Returns a device's step.

    Args:
        schedule: what it does.
        buckets: parameters that travel together, in the order in which they are sent.
        slowdown: what each entry takes longer than the schedule says; 1.1 for a tenth.
        launch: seconds that the host takes to hand over an entry.
        extra: by bucket, what the device does to send it, such as compressing it.
        beside: by bucket, what it does while that travels, before it goes on to compute.
    """
    entries, done = [*schedule.forward, *schedule.backward], done_after(schedule, buckets)
    for index in sorted({*extra, *neighbours}, reverse=True):
        before, behind = ([item[index]] if index in item else [] for item in (extra, neighbours))
        entries[done[index] : done[index]] = [*before, *behind]
        done[index:] = [count + len(before) for count in done[index:]]
        done[index + 1 :] = [count + len(behind) for count in done[index + 1 :]]
    seconds = np.array([entry.seconds for entry in entries]) * slowdown
    handed_over = np.arange(1, len(entries) + 1) * launch
    all_ends = ends(handed_over, seconds)
    since = np.concatenate([[0.0], all_ends])
    return Local(tuple(entries), seconds, all_ends, since[done], schedule.optimizer * slowdown)
