"""Input of the sensitivity methods: a repeatable step, parts of batches, and codec variances.

A part of a batch ranks operators as well as the full batch, with less memory (QSync, section IV).
Batches are any values that the user's step accepts; only tensors whose first dimension is the
number of samples are sliced.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from qsync_fx.communication.codecs import codec_named
from qsync_fx.errors import ProfileError
from qsync_fx.ops.spec import Place
from qsync_fx.plan.cluster_plan import CODECS, PLAIN
from qsync_fx.profiler.tensor_capture.graph_capture import Captured, Run, as_it_is
from qsync_fx.profiler.tensor_capture.rounding_sites import Changes, Follower
from qsync_fx.profiler.training_state import Again, trained

Key = tuple[str, str]
"""Operator id and precision."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class GradientStep:
    """A repeatable step of a captured model.

    Attributes:
        captured: the model.
        loss: computes the loss of the step's batch.
        again: restores the initial state of a pass.
        changes: rounding sites of each operator in each precision.
        generator: for draws outside the model.
        samples: number of samples in the batch.
    """

    captured: Captured
    loss: Callable[[], Tensor]
    again: Again
    changes: Changes
    generator: torch.Generator
    samples: int = 1

    @property
    def keys(self) -> list[Key]:
        """Operators and precisions with a rounding site."""
        return [
            (op, name)
            for op, by in self.changes.items()
            for name, change in by.items()
            if change.places
        ]

    @property
    def places(self) -> dict[str, set[Place]]:
        """Places of the tensors of each operator that change in some precision."""
        return {
            op: {p for change in by.values() for p in change.places}
            for op, by in self.changes.items()
        }

    @property
    def following(self) -> dict[str, dict[Follower, list[Key]]]:
        """For each follower, how it follows, and the operators and precisions that cause it."""
        result: dict[str, dict[Follower, list[Key]]] = {}
        for op, name in self.keys:
            for item in self.changes[op][name].following:
                result.setdefault(item.operator, {}).setdefault(item, []).append((op, name))
        return result

    def gradients(self, run: Run = as_it_is, sample: int = 0) -> Gradients:
        """Return the gradients of a pass with runner `run`; `sample` selects rounding draws."""
        self.again(sample)
        with self.captured.running(run):
            return gradients_of(self.loss(), self.captured.model)


class Method(Protocol):
    """A sensitivity method; it may learn from step to step."""

    def look(self, step: GradientStep) -> dict[Key, float]:
        """Return each operator's contribution in each precision; absent keys contribute 0."""


@dataclass(frozen=True)
class MethodSpec:
    """A sensitivity method.

    Attributes:
        name: name for users.
        make: makes an instance for a model.
        about: description for lists.
        passes: approximate forward and backward passes per step, from the numbers of operators and
            precisions.
        twice: whether it uses second derivatives, which fused attention kernels lack.
    """

    name: str
    make: Callable[[], Method]
    about: str
    passes: Callable[[int, int], int]
    twice: bool = False


def gradients_of(loss: Tensor, model: nn.Module) -> Gradients:
    """Return the gradients of a loss by parameter name, for the parameters it depends on."""
    parameters = trained(model)
    result = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(parameters, result, strict=True) if g is not None}


def square_distance(result: Gradients, exact: Gradients) -> float:
    return sum(
        float((result[name].double() - g.double()).square().sum())
        for name, g in exact.items()
        if name in result
    )


def samples(batch: Any) -> int:
    """Return the most common first dimension of a batch's tensors; 1 if there is none."""
    sizes: Counter[int] = Counter()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _map(batch, count)
    return max(1, sizes.most_common(1)[0][0]) if sizes else 1


def part_of(batch: Any, fraction: float) -> Any:
    """Return the first `fraction` of a batch's samples, rounded up."""
    full = samples(batch)
    saved = max(1, math.ceil(full * fraction))
    return _map(batch, lambda t: t[:saved] if t.dim() and t.shape[0] == full else t)


def stepped(batches: Iterable[Any], steps: int, fraction: float) -> Iterator[Any]:
    """Yield a part of a batch for each step; a short list repeats, an iterator ends.

    Raises:
        ProfileError: there is no batch.
    """
    again = itertools.cycle(batches) if isinstance(batches, Sequence) else batches
    none = True
    for batch in itertools.islice(again, steps):
        none = False
        yield part_of(batch, fraction)
    if none:
        raise ProfileError(
            "there are no batches to look at", do="give at least one batch, and at least one step"
        )


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        # Copy, since batch classes such as BatchEncoding are mappings with further attributes.
        result: Any = copy.copy(value)
        for key, item in value.items():
            result[key] = _map(item, change)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return value


_STRETCH: Final = 8192
"""Values per chunk: the largest block size of any codec."""
_STRETCHES: Final = 16


def of_gradients(gradients: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return the variance that each codec of a plan except FP32 adds, by parameter.

    The variance is exact for the given gradient, in closed form for stochastic rounding. For large
    gradients it is extrapolated from `_STRETCHES` chunks. Parameters with empty or non-finite
    gradients are omitted.
    """
    codecs = [codec_named(name) for name in CODECS if name != PLAIN]
    result: dict[str, dict[str, float]] = {}
    for name, gradient in gradients.items():
        available: dict[str, float] = {}
        for codec in codecs:
            fitted = codec.fitted(gradient.shape)
            ordered = fitted.columns(gradient)
            values = (
                (gradient if ordered is None else ordered)
                .detach()
                .float()
                .cpu()
                .contiguous()
                .flatten()
            )
            if not values.numel() or not bool(values.isfinite().all()):
                break
            part = _part(values)
            available[codec.name] = fitted.variance(part) * values.numel() / part.numel()
        else:
            result[name] = available
    return result


def _part(values: Tensor) -> Tensor:
    if values.numel() <= _STRETCH * _STRETCHES:
        return values
    full = values[: values.numel() // _STRETCH * _STRETCH].view(-1, _STRETCH)
    index = torch.linspace(0, len(full) - 1, _STRETCHES).round().long()
    return full[index].flatten()
