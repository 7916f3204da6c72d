"""The local data flow graph: when one device has done what, of a step that it is alone with.

A device does what its schedule says in order, each entry once the host has handed it over. The gradients of a bucket are whole after some
entry; DDP hands buckets over in order, so a bucket is ready once it and all before it are whole. Compressing them is work of the device.

Invariant: seconds count from the moment at which the device begins its step, at its full speed: what it waits for others, and what
communication slows down, is `step`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from qsync_fx.predictor.replay.closed_form import Array, ends
from qsync_fx.predictor.schedule import Entry, Schedule


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
    at = {parameter.path: number for number, parameter in enumerate(schedule.parameters)}
    return sorted(
        (at[path] for path in schedule.ready), key=lambda n: (schedule.ready[schedule.parameters[n].path], -n)
    )


def done_after(schedule: Schedule, buckets: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each bucket how many entries of forward and backward pass are done once it and those before it are whole."""
    paths = [parameter.path for parameter in schedule.parameters]
    done, found = 0, []
    for bucket in buckets:
        # What gets no gradient travels as zeros, which are there from the start.
        whole = (schedule.ready.get(paths[at], -1) for at in bucket)
        done = max(done, len(schedule.forward) + 1 + max(whole, default=-1))
        found.append(done)
    return found


def local(
    schedule: Schedule,
    buckets: Sequence[Sequence[int]] = (),
    *,
    slowdown: float = 1.0,
    launch: float = 0.0,
    extra: Mapping[int, Entry] = MappingProxyType({}),
    beside: Mapping[int, Entry] = MappingProxyType({}),
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
    for at in sorted({*extra, *beside}, reverse=True):
        before, behind = ([found[at]] if at in found else [] for found in (extra, beside))
        entries[done[at] : done[at]] = [*before, *behind]
        done[at:] = [count + len(before) for count in done[at:]]
        done[at + 1 :] = [count + len(behind) for count in done[at + 1 :]]
    seconds = np.array([entry.seconds for entry in entries]) * slowdown
    handed_over = np.arange(1, len(entries) + 1) * launch
    all_ends = ends(handed_over, seconds)
    since = np.concatenate([[0.0], all_ends])
    return Local(tuple(entries), seconds, all_ends, since[done], schedule.optimizer * slowdown)
