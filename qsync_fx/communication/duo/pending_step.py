"""Gradients of one step that await their FP32 mean, and the settings of its optimizer call.

Invariant: the gradients are copies from before the fast reduction, and the settings are from the
user's optimizer call. Saved states are equal on all ranks, so any rank can load one with any world
size, except with a sharded optimizer.
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
    """Bucket of gradients: `values` in FP32, and views of it in the layout of the parameters."""

    index: int
    values: Tensor
    pieces: Sequence[ParameterSlice]
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class Use:
    """Inputs of an optimizer step apart from parameters, state and gradients.

    Attributes:
        groups: settings of the optimizer.
        used: for each parameter, whether it had a gradient.
        factor: factor applied to the gradients after the backward pass; 1 for none.
        scale: scale that the optimizer removes itself; None for none.
        scaled: whether a GradScaler would skip the step for an infinity.
    """

    groups: Settings
    used: Sequence[bool]
    factor: float = 1.0
    scale: Tensor | None = None
    scaled: bool = False


@dataclass
class PendingStep:
    """Step whose FP32 mean is not applied yet.

    Attributes:
        step: number of the step.
        begun: time of its first bucket, in seconds of `time.perf_counter`.
        buckets: copies of the gradients, reduced in place.
        gradients: this rank's optimizer gradients in `buckets`, by parameter index.
        means: the same of the fast reduction.
        versions: identity and version counter of the optimizer's gradients after the backward pass;
            None without a gradient.
        aside: the same for gradients that the optimizer does not use.
        finite: whether all fast means are finite.
        plain, unscaled: digests of the fast means, and of their product with `factor`.
        factor: inverse scale of the GradScaler; None without one.
        use: inputs of the optimizer step; None before the optimizer's call.
        known: time when the FP32 mean was complete.
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
        """Record digests of the fast means, to detect changes of gradients before the step.

        Args:
            factor: inverse scale of the GradScaler; None without one.
            used: whether the fast means are finite on all ranks.
        """
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
        """Return the factor applied to the gradients since the backward pass.

        Return None if they, or the gradients `aside`, were changed in another way.
        """
        if not self.finite:
            return 1.0
        if versions(aside) != self.aside:
            return None
        result = digest(g for g in gradients if g is not None)
        if self.factor is not None:
            return self.factor if result == self.unscaled else 1.0 if result == self.plain else None
        # A write without effect, as by clipping below its limit, may have an effect in the next
        # step.
        return 1.0 if result == self.plain and versions(gradients) == self.versions else None


def versions(gradients: Iterable[Tensor | None]) -> list[tuple[int, int] | None]:
    """Return identity and version counter of each tensor."""
    return [None if g is None else (id(g), g._version) for g in gradients]


def finite(tensors: Iterable[Tensor]) -> bool:
    return all(math.isfinite(float(tensor.sum(dtype=torch.float64))) for tensor in tensors)


def digest(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the bit patterns as integers, which changes with scaling or addition."""
    total = sum(
        int(tensor.view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)) for tensor in tensors
    )
    return total % 2**64


class BufferPool:
    """Pool of buffers for gradient copies; allocation costs more than a copy."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Return an uninitialized FP32 buffer with the size and device of `like`."""
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
    """Return a copy of the pending step and the committed parameters for `load`."""
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
    """Raise `OptionError` for a state of another rank or world size, which has other shards."""
    if (state.get("rank"), state.get("world")) != (rank, world):
        raise OptionError(
            f"the state belongs to rank {state.get('rank')} of {state.get('world')}, whose "
            f"optimizer has other shards than rank {rank} of {world}",
            where="the sharded state of DUO",
            do="resume with the same number of ranks, each with its own state. To resume with "
            "another number, call handle.flush() before saving parameters, and start with a new "
            "optimizer or one that has loaded handle.whole_optimizer_state() before compress",
        )


def load(
    result: Mapping[str, Any], saved: Sequence[Tensor], pieces: Sequence[ParameterSlice]
) -> PendingStep:
    """Write the committed parameters into `saved`, and return the pending step.

    Raises:
        OptionError: the state is of another model.
    """
    weights, gradients = result["weights"], result["gradients"]
    for piece, weight in zip(pieces, saved, strict=True):
        if piece.name not in weights or weights[piece.name].shape != weight.shape:
            raise OptionError(
                "the state of DUO belongs to another model",
                where=f"{piece.name}, {list(weight.shape)}",
                do="load the state of the same model",
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
