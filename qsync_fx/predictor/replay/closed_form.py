"""Two streams of work that wait for one another, without a simulation.

Where the n-th piece of a stream starts once it is ready and the piece before it has ended, the ends are

    end[n] = max over m <= n of (ready[m] + seconds[m] + ... + seconds[n])

which is the sum of all seconds so far and the running maximum of how late each piece was: equation (6) of QSync for buckets that travel
one after the other, and the same for kernels that a device runs as the host hands them over.

Invariant: arrays may have any axes in front, of plans and of devices; the last one is that of pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
