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

    It describes buckets that travel one after the other (QSync, Eq. (6)), and kernels launched by a
    host. Both arguments are (..., pieces), in seconds.
    """
    total = np.cumsum(seconds, axis=-1)
    return np.asarray(np.maximum.accumulate(ready - (total - seconds), axis=-1) + total)


@dataclass(frozen=True)
class Overlap:
    """Relative slowdown, 0.1 for 10%, of computation while a bucket travels, and vice versa."""

    compute: float = 0.0
    transfer: float = 0.0


NONE: Final = Overlap()


@dataclass(frozen=True)
class DeviceStep:
    """Timeline of a step on all devices; times in seconds.

    Attributes:
        begins: (..., devices), start of the step on each device.
        ready: (..., devices, buckets), time at which each bucket is ready on each device.
        sent, arrived: (..., buckets), start and end of each transfer.
        computed, done: (..., devices), end of the backward pass and of the optimizer step.
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
        return np.asarray((self.done - self.begins).max(axis=-1))

    def moments(self, device: int, clock: Array) -> Array:
        """Return the times at which a device's local clock shows `clock`."""
        begins, used = self.begins[device : device + 1], self.arrived - self.sent
        return np.asarray(_moments(clock[None], begins, self.sent, used, self.slowed)[0])


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
        transfer: (..., buckets), duration of each transfer.
        begins: (..., devices), start of the step.
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

    A device with a fast optimizer begins earlier than others. The arguments are those of `step`.
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
        earlier, item = slice(0, index), slice(index, index + 1)
        moments[..., item] = _moments(
            ready[..., item], begins, sent[..., earlier], used[..., earlier], overlap.compute
        )
        sent[..., index] = np.maximum(moments[..., index].max(axis=-1), free)
        clock = _clocks(sent[..., : index + 1], used[..., : index + 1], begins, overlap.compute)
        left = np.maximum(computed - clock[..., -1], 0).max(axis=-1) * (1 + overlap.compute)
        together = np.minimum(left, transfer[..., index] * (1 + overlap.transfer))
        slower = together * overlap.transfer / (1 + overlap.transfer)
        used[..., index] = transfer[..., index] + slower
        free = sent[..., index] + used[..., index]
    computed = _moments(computed[..., None], begins, sent, used, overlap.compute)[..., 0]
    return moments, sent, sent + used, computed


def _clocks(sent: Array, used: Array, begins: Array, slowed: float) -> Array:
    """Return the local clocks of devices at the start of each transfer (..., devices, buckets)."""
    lost = (np.cumsum(used, axis=-1) - used) * slowed / (1 + slowed)
    return (sent - lost)[..., None, :] - begins[..., None]


def _moments(clock: Array, begins: Array, sent: Array, used: Array, slowed: float) -> Array:
    """Return the times at which local clocks show `clock` (..., devices, times).

    Transfers start at `sent` and take `used` seconds (..., buckets).
    """
    plain = begins[..., None] + clock
    if not slowed:
        return plain
    clocks = _clocks(sent, used, begins, slowed)
    during = (used / (1 + slowed))[..., None, None, :]
    together = np.clip(clock[..., :, None] - clocks[..., None, :], 0, during)
    return np.asarray(plain + slowed * together.sum(axis=-1))


@dataclass(frozen=True)
class Local:
    """Timeline of a device without other devices, at full speed, in seconds since its start.

    Attributes:
        seconds, ends: (entries,), durations and end times.
        ready: (buckets,), time at which each bucket can be sent.
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
    """Return parameters as their gradients become ready, else in reverse registration order."""
    index = {parameter.path: number for number, parameter in enumerate(schedule.parameters)}
    return sorted(
        (index[path] for path in schedule.ready),
        key=lambda n: (schedule.ready[schedule.parameters[n].path], -n),
    )


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

    The device runs its entries in order, each after the host has launched it.

    Args:
        buckets: parameters of each bucket, in sending order.
        slowdown: factor on all durations; 1.1 for 10% slower than the schedule.
        launch: seconds that the host needs to launch an entry.
        extra: by bucket, work of the device before it is sent, such as compression.
        neighbours: by bucket, work of the device after the start of its transfer, before it
            continues to compute.
    """
    entries, done = [*schedule.forward, *schedule.backward], list[int]()
    last = len(schedule.forward)
    for bucket in buckets:
        # DDP sends buckets in order, so a bucket also waits for all earlier ones. A parameter
        # without a gradient is sent as zeros, which are ready at the start.
        paths = (schedule.parameters[index].path for index in bucket)
        ends_at = max((schedule.ready.get(path, -1) for path in paths), default=-1)
        last = max(last, len(schedule.forward) + 1 + ends_at)
        done.append(last)
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
