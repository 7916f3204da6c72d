"""Timelines of a training step: local data flow graphs of devices and the global one (QSync).

`local` computes when a device finishes each entry. `step` joins the devices: a bucket travels once
it is ready on all devices and the bucket before it has arrived (QSync, Eq. (6)). `ends` is its
closed form. Arrays may have leading axes for plans, then devices, then buckets or entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    # The link times of a cluster file must not import torch.
    from qsync_fx.predictor.times import Entry, Schedule

Array = NDArray[Any]


def ends(ready: Array, seconds: Array) -> Array:
    """Return the end of each piece of a sequential stream that waits for `ready`.

        ends[n] = max over m <= n of (ready[m] + seconds[m] + ... + seconds[n])

    This is the sum of all durations so far plus the running maximum of the delays. It describes
    buckets that travel one after the other (QSync, Eq. (6)), and kernels launched by a host.

    Args:
        ready: (..., pieces), start times at the earliest, in seconds.
        seconds: (..., pieces), durations.
    """
    total = np.cumsum(seconds, axis=-1)
    late: Array = ready - (total - seconds)
    np.maximum.accumulate(late, axis=-1, out=late)
    late += total
    return late


@dataclass(frozen=True)
class Overlap:
    """Mutual slowdown of communication and computation, which share memory and CPU cores.

    Attributes:
        compute: relative slowdown of computation while a bucket travels; 0.1 for 10%.
        transfer: relative slowdown of a transfer while any device computes.
    """

    compute: float = 0.0
    transfer: float = 0.0


NONE: Final = Overlap()


@dataclass(frozen=True)
class DeviceStep:
    """Timeline of a step on all devices; times in seconds.

    Attributes:
        begins: (..., devices), start of the step on each device.
        ready: (..., devices, buckets), time at which each bucket is ready on each device.
        sent: (..., buckets), start of each transfer.
        arrived: (..., buckets), end of each transfer.
        computed: (..., devices), end of the backward pass.
        done: (..., devices), end of the optimizer step, when the next step can begin.
        slowed: relative slowdown of computation during transfers.
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
        """Interval between the starts of two steps in seconds."""
        longest: Array = (self.done - self.begins).max(axis=-1)
        return longest

    def moments(self, device: int, clock: Array) -> Array:
        """Return the times at which a device's local clock shows `clock`, for one plan."""
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
    """Return the timeline of a step of devices that begin at `begins`.

    Args:
        ready: (..., devices, buckets), time at which each bucket is ready, by the local clock.
        computed: (..., devices), end of the backward pass by the local clock.
        optimizer: (..., devices), duration of the optimizer and other work before the next step.
        transfer: (..., buckets), transfer duration of each bucket.
        begins: (..., devices), start of the step.
        overlap: mutual slowdown of communication and computation.
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
    """Return a steady-state step: each device begins when it has finished the previous step.

    A device with a fast optimizer begins earlier than others. The first step of a run, which all
    devices begin together, is therefore longer. The arguments are the same as for `step`.
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
    """Return when buckets are ready, sent and arrived, and when devices have computed.

    A local clock runs slower during transfers. All earlier transfers are known when a bucket
    becomes ready, so one iteration per bucket converts local clocks to times.
    """
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
    """Return the local clocks of devices at the start of each transfer (..., devices, buckets)."""
    lost = (np.cumsum(used, axis=-1) - used) * slowed / (1 + slowed)
    return (sent - lost)[..., None, :] - begins[..., None]


def _moments(clock: Array, begins: Array, clocks: Array, used: Array, slowed: float) -> Array:
    """Return the times at which local clocks show `clock` (..., devices, times).

    Args:
        clocks: local clocks of the devices at the start of each transfer.
        used: duration of each transfer.
    """
    plain: Array = begins[..., None] + clock
    if not slowed:
        return plain
    shown = (used / (1 + slowed))[..., None, None, :]
    neighbours = np.clip(clock[..., :, None] - clocks[..., None, :], 0, shown)
    plain += slowed * neighbours.sum(axis=-1)
    return plain


@dataclass(frozen=True)
class Local:
    """Timeline of a device without other devices, at full speed, in seconds since its start.

    Attributes:
        entries: entries in execution order.
        seconds: (entries,), durations.
        ends: (entries,), end times.
        ready: (buckets,), time at which each bucket can be sent.
        optimizer: duration of the optimizer step.
    """

    entries: tuple[Entry, ...]
    seconds: Array
    ends: Array
    ready: Array
    optimizer: float

    @property
    def computed(self) -> float:
        """End of the backward pass."""
        return float(self.ends[-1]) if len(self.ends) else 0.0


def arrival(schedule: Schedule) -> list[int]:
    """Return parameters in the order in which their gradients become ready.

    Gradients that become ready together are in reverse registration order.
    """
    index = {parameter.path: number for number, parameter in enumerate(schedule.parameters)}
    return sorted(
        (index[path] for path in schedule.ready),
        key=lambda n: (schedule.ready[schedule.parameters[n].path], -n),
    )


def done_after(schedule: Schedule, buckets: Sequence[Sequence[int]]) -> list[int]:
    """Return for each bucket the number of entries that must finish before it is ready.

    DDP sends buckets in order, so a bucket also waits for all earlier ones.
    """
    paths = [parameter.path for parameter in schedule.parameters]
    done, result = 0, []
    for bucket in buckets:
        # A parameter without a gradient is sent as zeros, which are ready at the start.
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
    """Return a device's timeline without other devices.

    The device runs its entries in order, each after the host has launched it. Compression of a
    bucket is work of the device.

    Args:
        schedule: schedule of the device.
        buckets: parameters of each bucket, in sending order.
        slowdown: factor on all durations; 1.1 for 10% slower than the schedule.
        launch: seconds that the host needs to launch an entry.
        extra: by bucket, work of the device before it is sent, such as compression.
        neighbours: by bucket, work of the device after the start of its transfer, before it
            continues to compute.
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
