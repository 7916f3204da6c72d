"""Batch sampler that gives each rank its own local batch size.

Invariants: in an epoch every sample is in the batch of exactly one rank, except those that
`drop_last` leaves out. All ranks have the same number of steps, and a sample in each of them. The
samples of a step depend on the order and on sum(batch sizes) only, so the invariants also hold in
an epoch in which batch sizes change.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from qsync_fx.distributed.agreement import Meeting, patience, several_ranks, told_to_all
from qsync_fx.errors import OptionError
from qsync_fx.plan import cluster_plan
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import DEVICE_CLASS


class DistributedBatchSampler(Sampler[list[int]]):
    """Batch sampler of one rank: `DataLoader(dataset, batch_sampler=DistributedBatchSampler(...))`.

    A step consists of the next sum(batch sizes) samples of the epoch's order, divided over ranks.
    Without `drop_last`, the last step divides the remaining samples in proportion to the
    batch sizes. If fewer samples than ranks remain, the step before leaves it samples, so that each
    rank has at least one; no batch exceeds its size.

    Args:
        dataset: the data set, or anything with the same length.
        batches: the batch size of each rank, equal on all ranks. Or a cluster plan or the path of
            its file: each rank then has the local batch of its class, and construction exchanges
            them, so all ranks construct the sampler together.
        device_class: with a plan, the class of this rank's device; by default the class that the
            plan or the environment gives it, as in the option "device_class".
        rank: this rank; by default the rank in torch.distributed, or else in the launcher.
        shuffle: whether each epoch has an order of its own, which depends on `seed` and the epoch.
        seed: seed of the order, equal on all ranks.
        drop_last: whether a last step of fewer samples is left out.

    Attributes:
        batches: the batch size of each rank, after the last `change`.
        batch_size: samples of this rank in a step, except possibly in the last two.
        position: the epoch and the step of the next batch that the sampler yields.

    Raises:
        OptionError: invalid batch sizes, a rank without one, a plan without a local batch for this
            rank, or a data set that cannot give each rank a sample in each step.
    """

    def __init__(
        self,
        dataset: Sized,
        batches: Sequence[int] | ClusterPlan | str | os.PathLike[str],
        *,
        device_class: str | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if isinstance(batches, ClusterPlan | str | os.PathLike):
            batches = _planned(batches, device_class)
        elif device_class is not None:
            text = "the class of a device has no batch size without a plan"
            raise _wrong("device_class", text, "pass a plan instead of batch sizes, or remove it")
        self.batches = _checked(batches)
        self.rank = _rank(rank, len(self.batches))
        self.batch_size = self.batches[self.rank]
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._epoch = self._first = 0
        self.position: tuple[int, int] = 0, 0
        self._initial = self.batches
        self._changes: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        self._samples, total = len(dataset), sum(self.batches)
        self._steps = self._samples // total
        if not drop_last:
            self._steps = -(-self._samples // total)
            if self._samples < self._steps * len(self.batches):
                text = f"{self._samples} samples cannot be divided into {self._steps} steps in "
                text += f"which each of {len(self.batches)} ranks has at least one"
                do = "pass drop_last=True, which leaves out the last step, or use larger batches"
                raise _wrong("dataset", text, do)
        if not self._steps:
            text = f"the data set has {self._samples} samples, but a step needs {total}"
            raise _wrong("dataset", text, "use smaller batches or drop_last=False, or more data")

    @property
    def sampler(self) -> DistributedBatchSampler:
        """The sampler itself: trainers call `set_epoch` of a batch sampler's `sampler`."""
        return self

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Set the epoch, on which the order depends, and its first step, to resume within it."""
        if not 0 <= step <= self._steps:
            text = f"an epoch has {self._steps} steps, so it cannot begin at step {step}"
            do = "pass the number of completed steps of this epoch"
            raise OptionError(text, where="set_epoch(..., step=...)", do=do)
        self._epoch, self._first = self.position = epoch, step

    def change(self, batches: Sequence[int], start: tuple[int, int]) -> None:
        """Divide steps by other batch sizes of the same sum, from an epoch and its step on.

        Call it on all ranks with the same arguments, before any rank has yielded the batch of
        `start`: the maximum of all ranks' `position`, which differ if loaders prefetch batches.
        Raise `OptionError` for other sums or numbers of ranks, or if `start` has passed.
        """
        changed = _checked(batches)
        if (len(changed), sum(changed)) != (len(self.batches), sum(self.batches)):
            text = f"the batch sizes {list(changed)} do not replace {list(self.batches)}"
            do = "pass one batch size for each rank, with the same sum"
            raise OptionError(text, where="change(batches=...)", do=do)
        if start < self.position:
            text = f"step {start[1]} of epoch {start[0]} has its batch already"
            do = "pass the maximum of all ranks' position"
            raise OptionError(text, where="change(..., start=...)", do=do)
        self._changes.append((start, changed))
        self.batches, self.batch_size = changed, changed[self.rank]

    def __len__(self) -> int:
        """Return the number of steps from the first step on, equal on all ranks."""
        return self._steps - self._first

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self._epoch)
            order = torch.randperm(self._samples, generator=generator)
        epoch, first = self._epoch, self._first
        total, position = sum(self.batches), 0
        for step in range(self._steps):
            # Samples that the later steps need at least.
            reserve = (self._steps - step - 1) * len(self.batches) * (not self.drop_last)
            size = min(total, self._samples - position - reserve)
            if step >= first:
                sizes = shares(size, self._batches_at(epoch, step))
                bounds = list(itertools.accumulate(sizes, initial=position))
                self.position = epoch, step + 1
                yield order[bounds[self.rank] : bounds[self.rank + 1]].tolist()
            position += size

    def _batches_at(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the batch size of each rank in a step."""
        changed = (batches for start, batches in reversed(self._changes) if start <= (epoch, step))
        return next(changed, self._initial)


def shares(samples: int, batches: Sequence[int]) -> list[int]:
    """Divide the samples of a step over ranks in proportion to their batch sizes.

    Every rank has one sample; the others are divided by the largest remainders of the batch sizes
    less one, so no share exceeds its batch. `samples` is between the number of ranks and
    sum(batches).
    """
    spare, total = samples - len(batches), max(sum(batches) - len(batches), 1)
    result = [1 + spare * (batch - 1) // total for batch in batches]
    remainders = [spare * (batch - 1) % total for batch in batches]
    largest = sorted(range(len(batches)), key=lambda rank: -remainders[rank])
    for rank in largest[: samples - sum(result)]:
        result[rank] += 1
    return result


def _planned(
    plan: ClusterPlan | str | os.PathLike[str], device_class: str | None
) -> tuple[int, ...]:
    """Return the local batch of each rank by a cluster plan; call it on all ranks."""
    with told_to_all():
        part = cluster_plan.part_of_this_process(
            plan if isinstance(plan, ClusterPlan) else cluster_plan.read_plan(plan), device_class
        )
        batch = cluster_plan.local_batch(part.notes)
        if batch is None:
            name = part.notes.get(DEVICE_CLASS)
            text = f"the plan has no local batch for the class {name}"
            if name is None:
                text = "a plan for one device has no local batches"
            do = 'use ClusterPlan(..., batches={"t4": 16, ...}), or pass a list of batch sizes'
            raise _wrong("batches", text, do)
    if not several_ranks():
        return (batch,)
    with Meeting(patience(), None, collectives=False) as meeting:
        meeting.put("local batch", str(batch))
        return tuple(int(text) for text in meeting.get_all("local batch", patience()))


def _checked(batches: Sequence[int]) -> tuple[int, ...]:
    do = "pass the batch size of each rank from rank 0, as in [48, 16]"
    if not isinstance(batches, Sequence) or not batches:
        raise _wrong("batches", f"batch sizes must be a list, not {batches!r}", do)
    for rank, batch in enumerate(batches):
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            text = f"the batch size of rank {rank} must be a positive integer, not {batch!r}"
            raise _wrong("batches", text, do)
    return tuple(batches)


def _rank(rank: int | None, count: int) -> int:
    process = cluster_plan.this_process()
    if rank is None:
        if process.world is not None and process.world != count:
            text = f"there are {process.world} ranks, but {count} batch sizes"
            do = "pass one batch size for each rank; with a plan, call init_process_group first"
            raise _wrong("batches", text, do)
        rank = process.rank
    if rank is None and count == 1:
        return 0
    if rank is None:
        do = "call init_process_group first, or pass rank=..."
        raise _wrong("rank", "the rank of this process is unknown", do)
    if not 0 <= rank < count:
        text = f"rank {rank} has no batch size among {count}"
        raise _wrong("rank", text, f"use a rank from 0 to {count - 1}")
    return rank


def _wrong(name: str, text: str, do: str) -> OptionError:
    return OptionError(text, where=f"DistributedBatchSampler(..., {name}=...)", do=do)
