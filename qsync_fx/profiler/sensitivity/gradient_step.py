"""One step of a model as the methods see it: what to run, again and again, and what operators may do otherwise in it.

Parts of batches: half of one tells as much of how operators rank, in half the memory (QSync, section IV).

Invariant: a batch is whatever a user's `step` takes; what is no tensor of one entry a sample goes through as it is.

What codecs of gradients add to the variance of a model's gradients, by parameter.

Exact of the gradient at hand, in closed form where a codec rounds at random. Of a large gradient it is that of stretches all over it,
131,072 values.

Invariant: what is found is a function of the gradients alone.
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
"""An operator and a precision."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class GradientStep:
    """
    Attributes:
        captured: the model.
        loss: computes the loss of this step's batch.
        again: starts a pass from the same state.
        changes: what operators do otherwise in each precision.
        generator: for what is drawn beside the model.
        samples: of the batch.
    """

    captured: Captured
    loss: Callable[[], Tensor]
    again: Again
    changes: Changes
    generator: torch.Generator
    samples: int = 1

    @property
    def keys(self) -> list[Key]:
        """The operators and precisions in which something changes."""
        return [
            (op, name)
            for op, by in self.changes.items()
            for name, change in by.items()
            if change.places
        ]

    @property
    def places(self) -> dict[str, set[Place]]:
        """Of each operator the places of the tensors that change in some precision."""
        return {
            op: {p for change in by.values() for p in change.places}
            for op, by in self.changes.items()
        }

    @property
    def following(self) -> dict[str, dict[Follower, list[Key]]]:
        """Of each operator that follows others, how, and whom in which precisions."""
        result: dict[str, dict[Follower, list[Key]]] = {}
        for op, name in self.keys:
            for item in self.changes[op][name].following:
                result.setdefault(item.operator, {}).setdefault(item, []).append((op, name))
        return result

    def gradients(self, run: Run = as_it_is, sample: int = 0) -> Gradients:
        """Returns the gradients of one pass, whose graphs `run` runs; `sample` tells apart what is rounded at random."""
        self.again(sample)
        with self.captured.running(run):
            return gradients_of(self.loss(), self.captured.model)


class Method(Protocol):
    """A way to find what operators add; it may learn from step to step."""

    def look(self, step: GradientStep) -> dict[Key, float]:
        """Returns what each operator adds in each precision in a step; keys that are left out add nothing."""


def gradients_of(loss: Tensor, model: nn.Module) -> Gradients:
    """Returns the gradients of a loss by the parameters of a model that it depends on."""
    parameters = trained(model)
    result = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(parameters, result, strict=True) if g is not None}


def square_distance(result: Gradients, exact: Gradients) -> float:
    """Returns the square of the distance of two sets of gradients."""
    return sum(
        float((result[name].double() - g.double()).square().sum())
        for name, g in exact.items()
        if name in result
    )


def samples(batch: Any) -> int:
    """Returns the number of samples of a batch: the first size that most of its tensors have; 1 where there are none."""
    sizes: Counter[int] = Counter()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _map(batch, count)
    return max(1, sizes.most_common(1)[0][0]) if sizes else 1


def part_of(batch: Any, fraction: float) -> Any:
    """Returns the first samples of a batch, as many as `fraction` says, at least one."""
    full = samples(batch)
    saved = max(1, math.ceil(full * fraction))
    return _map(batch, lambda t: t[:saved] if t.dim() and t.shape[0] == full else t)


def stepped(batches: Iterable[Any], steps: int, fraction: float) -> Iterator[Any]:
    """Yields a part of a batch for each step; a list that is too short starts again, an iterator ends.

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
        # Classes of batches (BatchEncoding) are mappings with more to them.
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
"""The largest unit that a codec has."""
_STRETCHES: Final = 16


def of_gradients(gradients: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns for each parameter what each codec that a plan may name adds, but FP32; nothing for gradients that are not finite."""
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
    """Returns all values, or stretches that lie evenly."""
    if values.numel() <= _STRETCH * _STRETCHES:
        return values
    full = values[: values.numel() // _STRETCH * _STRETCH].view(-1, _STRETCH)
    index = torch.linspace(0, len(full) - 1, _STRETCHES).round().long()
    return full[index].flatten()
