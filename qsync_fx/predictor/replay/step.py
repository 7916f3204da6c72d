"""The global data flow graph: steps of several devices, joined by the buckets that all of them send.

A bucket starts to travel once it is ready on all devices and the bucket before it has arrived (QSync, equation (6)). While one travels,
devices compute slower, and while any device computes, buckets travel slower: both share memory and, on a CPU, cores. The optimizer runs
once everything has arrived.

Without slowing down that is `closed_form`. With it, one turn a bucket: all earlier transfers are known when a bucket becomes ready, so
a device's own clock, which runs slower during them, tells when that is.

Invariant: arrays may have axes of plans in front; then devices, then buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from qsync_fx.predictor.replay.closed_form import Array, ends


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
class Step:
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
        begins, taken = self.begins[device : device + 1], self.arrived - self.sent
        clocks = _clocks(self.sent, taken, begins, self.slowed)
        moments: Array = _moments(clock[None], begins, clocks, taken, self.slowed)[0]
        return moments


def step(
    ready: Array, computed: Array, optimizer: Array, transfer: Array, begins: Array, overlap: Overlap = NONE
) -> Step:
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
    return Step(begins, ready, sent, arrived, computed, synchronized + optimizer, overlap.compute)


def steady(ready: Array, computed: Array, optimizer: Array, transfer: Array, overlap: Overlap = NONE) -> Step:
    """Returns a step as those before and after it: each device begins it when it was done with the last one.

    A device whose optimizer is quick begins before others, so the first step of a run, which all begin at once, takes longer. The
    arguments are those of `step`.
    """
    begins = optimizer - optimizer.min(axis=-1, keepdims=True)
    for _ in range(_TURNS):
        found = step(ready, computed, optimizer, transfer, begins, overlap)
        following = found.done - found.done.min(axis=-1, keepdims=True)
        if not transfer.shape[-1] or np.abs(following - begins).max() <= _SAME * np.abs(found.seconds).max():
            break
        begins = following
    return found


_TURNS: Final = 64
_SAME: Final = 1e-12


def _slowed(
    ready: Array, computed: Array, transfer: Array, begins: Array, overlap: Overlap
) -> tuple[Array, Array, Array, Array]:
    """Returns when buckets are ready, are sent and arrive, and when devices have computed."""
    transfer = np.broadcast_to(transfer, (*ready.shape[:-2], ready.shape[-1]))
    moments, sent, taken = np.empty_like(ready), np.zeros_like(transfer), np.zeros_like(transfer)
    free = np.zeros(transfer.shape[:-1])
    for at in range(transfer.shape[-1]):
        before = slice(0, at)
        clocks = _clocks(sent[..., before], taken[..., before], begins, overlap.compute)
        one = ready[..., at : at + 1]
        moments[..., at] = _moments(one, begins, clocks, taken[..., before], overlap.compute)[..., 0]
        sent[..., at] = np.maximum(moments[..., at].max(axis=-1), free)
        clock = _clocks(sent[..., : at + 1], taken[..., : at + 1], begins, overlap.compute)[..., -1]
        left = np.maximum(computed - clock, 0).max(axis=-1) * (1 + overlap.compute)
        beside = np.minimum(left, transfer[..., at] * (1 + overlap.transfer))
        taken[..., at] = transfer[..., at] + beside * overlap.transfer / (1 + overlap.transfer)
        free = sent[..., at] + taken[..., at]
    clocks = _clocks(sent, taken, begins, overlap.compute)
    computed = _moments(computed[..., None], begins, clocks, taken, overlap.compute)[..., 0]
    return moments, sent, sent + taken, computed


def _clocks(sent: Array, taken: Array, begins: Array, slowed: float) -> Array:
    """Returns what each device's own clock shows when each bucket is sent (..., devices, buckets)."""
    lost = (np.cumsum(taken, axis=-1) - taken) * slowed / (1 + slowed)
    return (sent - lost)[..., None, :] - begins[..., None]


def _moments(clock: Array, begins: Array, clocks: Array, taken: Array, slowed: float) -> Array:
    """Returns when own clocks show times (..., devices, times), of devices whose clocks show `clocks` when buckets are sent."""
    plain: Array = begins[..., None] + clock
    if not slowed:
        return plain
    shown = (taken / (1 + slowed))[..., None, None, :]
    beside = np.clip(clock[..., :, None] - clocks[..., None, :], 0, shown)
    plain += slowed * beside.sum(axis=-1)
    return plain
