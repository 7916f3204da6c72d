"""This rank's gradients of one step, kept in FP32 until their mean over ranks is known, and what the optimizer was to make of them.

Invariant: a replica belongs to one step. Its gradients are those that were given to the fast reduction, before it, and its settings those
of the user's call of the optimizer.

What DUO has outstanding between two steps, as it is saved: parameters before the look ahead, and gradients not used in full yet.

Invariant: all ranks save the same, so any of them may load it, among as many ranks as there may be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qsync_fx.communication.bucket import ParameterSlice
from qsync_fx.communication.duo.functional_optimizer import Settings, copied
from qsync_fx.errors import OptionError

_INTEGERS = {integer.itemsize: integer for integer in (torch.int16, torch.int32)}


@dataclass
class SavedBucket:
    """A bucket of gradients: `values` in FP32, and views of it that lie as the parameters do."""

    index: int
    values: Tensor
    pieces: Sequence[ParameterSlice]
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class Use:
    """What a step of the optimizer depends on beside parameters, state and gradients.

    Attributes:
        groups: the settings of the optimizer.
        used: of each parameter, whether it had a gradient.
        factor: what gradients were multiplied with after the backward pass; 1 for nothing.
        scale: what the optimizer itself takes out of them; None for nothing.
        scaled: whether a GradScaler would leave the step out for an infinity.
    """

    groups: Settings
    used: Sequence[bool]
    factor: float = 1.0
    scale: Tensor | None = None
    scaled: bool = False


@dataclass
class PendingStep:
    """Attributes:
    step: whose gradients these are.
    begun: when the first of them was there.
    buckets: what is to be reduced, or has been.
    gradients: by the place of the parameter, what is for this rank's optimizer.
    means: of the fast reduction, in the same way.
    versions: which tensors the optimizer's gradients were after the backward pass, and in which state; None where there was none.
    aside: the same of gradients that no step is taken with.
    finite: whether all means are.
    plain, unscaled: digests of them as they are, and times `factor`.
    factor: what a GradScaler multiplies them with; None where there is none.
    use: what the optimizer was to make of them; None before it was called.
    known: when the mean was.
    """

    step: int
    begun: float = field(default_factory=time.perf_counter)
    buckets: list[SavedBucket] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    versions: list[tuple[int, int] | None] = field(default_factory=list)
    aside: list[tuple[int, int] | None] = field(default_factory=list)
    finite: bool = True
    plain: int = 0
    unscaled: int = 0
    factor: float | None = None
    use: Use | None = None
    known: float = 0.0

    def close(self, factor: float | None, used: bool = True) -> None:
        """Notes what the fast means are, so that it can be told whether they were changed, or multiplied with a GradScaler's `factor`;
        `used` says whether those of other ranks are finite."""
        means, self.factor = list(self.means.values()), factor
        self.finite = used and finite(means)
        self.plain = digest(means)
        self.unscaled = (
            digest(mean * factor for mean in means) if factor is not None else self.plain
        )
        self.means = {}

    def factor_found(
        self, gradients: Sequence[Tensor | None], aside: Sequence[Tensor | None] = ()
    ) -> float | None:
        """Returns what gradients have been multiplied with since the backward pass; None where they, or those `aside`, were changed
        otherwise."""
        if not self.finite:
            return 1.0
        if versions(aside) != self.aside:
            return None
        result = digest(g for g in gradients if g is not None)
        if self.factor is not None:
            return self.factor if result == self.unscaled else 1.0 if result == self.plain else None
        # A gradient that is written to without effect, as clipping does below its limit, may be changed by the next step's.
        return 1.0 if result == self.plain and versions(gradients) == self.versions else None


def versions(gradients: Iterable[Tensor | None]) -> list[tuple[int, int] | None]:
    """Returns which tensors these are, and how often they were written to."""
    return [None if g is None else (id(g), g._version) for g in gradients]


def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite."""
    return all(math.isfinite(float(tensor.sum(dtype=torch.float64))) for tensor in tensors)


def digest(tensors: Iterable[Tensor]) -> int:
    """Returns a number that is another one where a tensor was multiplied or added to: the sum of what its values are as integers."""
    total = sum(
        int(tensor.view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)) for tensor in tensors
    )
    return total % 2**64


class BufferPool:
    """Memory for replicas, used again: new memory costs more than it takes to fill it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Returns FP32 values, as many as these and beside them, not filled."""
        free = self._free.get(like.numel())
        return (
            free.pop()
            if free
            else torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        )

    def give(self, replica: PendingStep) -> None:
        for bucket in replica.buckets:
            self._free.setdefault(bucket.values.numel(), []).append(bucket.values)
        replica.buckets, replica.gradients = [], {}


def saved(
    pending: PendingStep, use: Use, saved: Sequence[Tensor], pieces: Sequence[ParameterSlice]
) -> dict[str, Any]:
    """Returns what `load` takes: a copy."""
    return {
        "step": pending.step,
        "weights": {
            piece.name: weight.clone() for piece, weight in zip(pieces, saved, strict=True)
        },
        "gradients": {
            pieces[place].name: gradient.clone() for place, gradient in pending.gradients.items()
        },
        "groups": copied(use.groups),
        "used": list(use.used),
        "factor": use.factor,
        "scale": use.scale,
        "scaled": use.scaled,
    }


def check_rank(state: Mapping[str, Any], rank: int, world: int) -> None:
    """Raises `OptionError` where a state is of another rank, or of one among more or fewer, which has other parts of parameters."""
    if (state.get("rank"), state.get("world")) != (rank, world):
        raise OptionError(
            f"the state is that of rank {state.get('rank')} of {state.get('world')}, whose optimizer has other parts of parameters than "
            f"that of rank {rank} of {world}",
            where="the state of DUO, sharded",
            do="go on among as many ranks, each with its own state; among others, flush before parameters are saved, and begin with a new "
            "optimizer, or with one that has loaded handle.whole_optimizer_state() before compress",
        )


def load(
    result: Mapping[str, Any], saved: Sequence[Tensor], pieces: Sequence[ParameterSlice]
) -> PendingStep:
    """Writes the parameters before the look ahead into `kept`, and returns the gradients.

    Raises:
        OptionError: it is of another model.
    """
    weights, gradients = result["weights"], result["gradients"]
    for piece, weight in zip(pieces, saved, strict=True):
        if piece.name not in weights or weights[piece.name].shape != weight.shape:
            raise OptionError(
                "the state of DUO is of another model",
                where=f"{piece.name}, {list(weight.shape)}",
                do="load it into the same model",
            )
    for piece, weight in zip(pieces, saved, strict=True):
        weight.copy_(weights[piece.name])
    places = {piece.name: place for place, piece in enumerate(pieces)}
    pending = PendingStep(result["step"])
    pending.gradients = {places[name]: gradient.clone() for name, gradient in gradients.items()}
    pending.use = Use(
        copied(result["groups"]),
        list(result["used"]),
        result["factor"],
        result["scale"],
        result["scaled"],
    )
    return pending
