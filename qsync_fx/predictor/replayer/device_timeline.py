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
    from qsync_fx.predictor.cost_mapper.times import Entry, Schedule

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
class DeviceStep:
    """Timeline of a step on all devices; times in seconds.

    Attributes:
        begins: (..., devices), start of the step on each device.
        ready: (..., devices, buckets), time at which each bucket is ready on each device.
        sent, arrived: (..., buckets), start and end of each transfer.
        computed, done: (..., devices), end of the backward pass and of the optimizer step.
    """

    begins: Array
    ready: Array
    sent: Array
    arrived: Array
    computed: Array
    done: Array

    @property
    def seconds(self) -> Array:
        """Interval between the starts of two steps in seconds."""
        return np.asarray((self.done - self.begins).max(axis=-1))


def step(
    ready: Array, computed: Array, optimizer: Array, transfer: Array, begins: Array
) -> DeviceStep:
    """Return the timeline of a step of devices that begin at `begins`.

    All arguments but `transfer`, which is (..., buckets), have a device axis as in `DeviceStep`;
    `ready` and `computed` count from `begins`. `optimizer` is all work up to the next step.
    """
    ready, computed = ready + begins[..., None], computed + begins
    arrived = ends(ready.max(axis=-2), transfer)
    sent = arrived - transfer
    synchronized = np.maximum(arrived[..., -1:], computed) if arrived.shape[-1] else computed
    return DeviceStep(begins, ready, sent, arrived, computed, synchronized + optimizer)


def steady(ready: Array, computed: Array, optimizer: Array, transfer: Array) -> DeviceStep:
    """Return a steady-state step: each device begins when it has finished the previous step.

    A device with a fast optimizer begins earlier than others. See `step` for the arguments.
    """
    begins = optimizer - optimizer.min(axis=-1, keepdims=True)
    for _ in range(_TURNS):
        result = step(ready, computed, optimizer, transfer, begins)
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


@dataclass(frozen=True)
class Local:
    """Timeline of a device alone, in seconds since its start; `ready` is (buckets,)."""

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
