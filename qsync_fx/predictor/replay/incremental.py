"""The seconds of a step while a plan is searched: one operator changes, and the answer is there in microseconds.

Invariant: after any sequence of changes the seconds are those that `closed_form.iteration` gives for the new times, up to rounding. A
change is undone by the opposite one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsync_fx.predictor.replay.closed_form import Array


class Incremental:
    """The steps of a run whose devices' entries change one at a time.

    Args:
        seconds: (devices, entries), what each entry takes.
        done_after: for each bucket, how many entries are done once it is ready; never falling.
        transfer: (buckets,), seconds that each travels.
        optimizer: (devices,), seconds between the last bucket and the next step.
    """

    def __init__(self, seconds: Array, done_after: Sequence[int], transfer: Array, optimizer: Array) -> None:
        rest = np.cumsum(transfer[::-1])[::-1]
        counts = np.asarray(done_after, dtype=int)
        ready = whole(seconds, counts)
        # The end of the backward pass is one more thing to wait for, with nothing to send.
        self._late = np.concatenate([ready + rest, seconds.sum(axis=-1, keepdims=True)], axis=-1) + optimizer[:, None]
        self._first = np.searchsorted(counts, np.arange(seconds.shape[-1]), side="right").tolist()
        self._latest = self._late.max(axis=-1)
        self._device, self._others = -1, -np.inf

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return float(self._latest.max())

    def changed(self, device: int, entry: int, by: float) -> float:
        """Lets an entry of a device take longer, or shorter, and returns the seconds of a step."""
        late = self._late[device]
        late[self._first[entry] :] += by
        own = self._latest[device] = np.maximum.reduce(late)
        if device != self._device:
            # A search stays with a device for long, and there may be thousands of others.
            others = np.delete(self._latest, device)
            self._device, self._others = device, others.max(initial=-np.inf)
        return float(max(own, self._others))


def whole(seconds: Array, done_after: Sequence[int] | Array) -> Array:
    """Returns (..., buckets): the seconds of the entries that are done once each bucket is ready.

    Args:
        seconds: (..., entries). Of thousands of devices half as fast again in single precision.
        done_after: for each bucket, how many entries those are; never falling.
    """
    edges, at = np.unique(np.concatenate([[0], done_after]), return_inverse=True)
    total = np.zeros((*seconds.shape[:-1], len(edges)))
    if len(edges) > 1:
        # reduceat sums from each edge to the next one, and the last of them to the end.
        parts = np.add.reduceat(seconds[..., : edges[-1]], edges[:-1], axis=-1)
        np.cumsum(parts, axis=-1, dtype=np.float64, out=total[..., 1:])
    return total[..., at[1:]]
