"""Interface of the sensitivity methods: their registry, and their input, a repeatable step.

All methods estimate the variance that is added to the gradients of all parameters.
docs/howto-indicator.md adds a method.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from qsync_fx.communication.codecs import codec_named
from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import OptionError, ProfileError, nearest, shown
from qsync_fx.ops.spec import Place
from qsync_fx.plan.cluster_plan import CODECS, PLAIN
from qsync_fx.profiler.tensor_capture.graph_capture import Captured, Run, as_it_is
from qsync_fx.profiler.tensor_capture.rounding_sites import Changes, Follower

Key = tuple[str, str]
"""Operator id and precision."""

Gradients = dict[str, Tensor]


class Method(Protocol):
    """A sensitivity method.

    One that learns from step to step has a property `learned`, its state for a checkpoint, and a
    method `learn` that restores it.
    """

    def look(self, step: GradientStep) -> dict[Key, float]:
        """Return each operator's contribution in each precision; absent keys contribute 0."""


@dataclass(frozen=True)
class MethodSpec:
    """A sensitivity method, which `make` makes for a model.

    Attributes:
        passes: approximate passes per step, from the numbers of operators and precisions.
        twice: whether it uses second derivatives, which fused attention kernels lack.
    """

    name: str
    make: Callable[[], Method]
    passes: Callable[[int, int], int]
    twice: bool = False


_registered: dict[str, MethodSpec] = {}


def register(*specs: MethodSpec) -> None:
    """Add methods from outside of this package, which replace equally named ones."""
    _registered.update((spec.name, spec) for spec in specs)


@functools.cache
def _included() -> Mapping[str, MethodSpec]:
    return listed_in_modules("qsync_fx.profiler.sensitivity", "METHODS")


def methods() -> Mapping[str, MethodSpec]:
    return {**_included(), **_registered}


def method(name: str) -> MethodSpec:
    if name not in methods():
        message = f"{name!r} is not a method to estimate a sensitivity"
        raise ProfileError(message, do=nearest(str(name), methods()))
    return methods()[name]


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require gradients, without duplicates."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(loss: Tensor, model: nn.Module) -> Gradients:
    parameters = trained(model)
    result = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(parameters, result, strict=True) if g is not None}


@dataclass(frozen=True)
class GradientStep:
    """A repeatable step of a captured model.

    Attributes:
        again: restores buffers and generators before a pass; the number of the sample selects the
            draws of rounding.
        generator: for draws outside the model.
        samples: number of samples in the batch.
    """

    captured: Captured
    loss: Callable[[], Tensor]
    again: Callable[[int], None]
    changes: Changes
    generator: torch.Generator
    samples: int = 1

    @property
    def keys(self) -> list[Key]:
        sites = [(op, name, site) for op, by in self.changes.items() for name, site in by.items()]
        return [(operator, name) for operator, name, site in sites if site.places]

    @property
    def places(self) -> dict[str, set[Place]]:
        """Places of each operator's tensors that change in some precision."""
        return {
            op: {place for site in by.values() for place in site.places}
            for op, by in self.changes.items()
        }

    @property
    def following(self) -> dict[str, dict[Follower, list[Key]]]:
        """Followers, with the operators and precisions that cause them, by operator."""
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

    def square_error(self, run: Run, exact: Gradients, draws: int = 1) -> float:
        """Return the square distance of the gradients from `exact`, averaged over the draws."""
        total = 0.0
        for sample in range(draws):
            for name, gradient in self.gradients(run, sample).items():
                total += float((gradient.double() - exact[name].double()).square().sum())
        return total / draws


class GradientNoise:
    """Variance of the gradient between batches, summed over all elements.

    Half of the mean square difference of successive steps is unbiased, and needs one copy of the
    gradient (J. von Neumann et al., "The Mean Square Successive Difference", 1941). So is their
    mean product, of the square norm of the expected gradient.
    """

    def __init__(self) -> None:
        self._last: Gradients = {}
        self._squares: list[float] = []
        self._products: list[float] = []
        self._samples: list[int] = []

    def add(self, gradients: Gradients, samples: int = 1) -> None:
        """Add the gradients of a step, the mean over a number of samples."""
        if self._last:
            pairs = [
                (gradients[name].double(), self._last[name].double())
                for name in self._last.keys() & gradients.keys()
            ]
            self._squares.append(sum(float((new - last).square().sum()) for new, last in pairs))
            self._products.append(sum(float((new * last).sum()) for new, last in pairs))
            self._samples.append(samples)
        self._last = gradients

    def value(self, fraction: float) -> float | None:
        """Return the variance of a whole batch's gradient; None after fewer than two steps."""
        if not self._squares:
            return None
        return fraction * statistics.fmean(self._squares) / 2

    def scale(self) -> float | None:
        """Return the gradient noise scale tr(Sigma) / |G|^2, in samples; see `Sensitivity`.

        None after fewer than two steps, or if the noise hides the expected gradient G.
        """
        if not self._squares or sum(self._products) <= 0:
            return None
        pairs = zip(self._samples, self._squares, strict=True)
        return sum(samples * square / 2 for samples, square in pairs) / sum(self._products)


def samples(batch: Any) -> int:
    """Return the most common first dimension of a batch's tensors; 1 if there is none."""
    sizes: Counter[int] = Counter()
    _map(batch, lambda tensor: sizes.update(tensor.shape[:1]))
    (most, _), *_ = sizes.most_common(1) or [(1, 0)]
    return max(1, most)


def part_of(batch: Any, fraction: float) -> Any:
    """Return the first `fraction` of a batch's samples, rounded up."""
    return with_samples(batch, max(1, math.ceil(samples(batch) * fraction)))


def with_samples(batch: Any, count: int) -> Any:
    """Return the first `count` samples of a batch, which is repeated if it has fewer."""
    full = samples(batch)
    if count == full:
        return batch

    def part(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != full:
            return tensor
        if count > full:
            tensor = torch.cat([tensor] * math.ceil(count / full))
        return tensor[:count]

    return _map(batch, part)


def sized(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a batch with each of the given numbers of samples; as it is if there are none."""
    for size in sizes:
        if type(size) is not int or size < 1:
            message = f"{shown(str(size))} is no number of samples"
            raise OptionError(message, where="batch_sizes", do="give whole numbers from 1")
    result = [with_samples(batch, size) for size in dict.fromkeys(sizes)]
    if [samples(item) for item in result] != list(dict.fromkeys(sizes)):
        message = "the batch has no tensor with a dimension of samples"
        do = "measure each size separately, and give find_plan a list of profiles of the class"
        raise OptionError(message, where="batch_sizes", do=do)
    return result or [batch]


def stepped(batches: Iterable[Any], steps: int, fraction: float) -> Iterator[Any]:
    """Yield a part of a batch for each step; a short list repeats, an iterator ends."""
    if isinstance(batches, Sequence):
        batches = itertools.cycle(batches)
    empty = True
    for batch in itertools.islice(batches, steps):
        empty = False
        yield part_of(batch, fraction)
    if empty:
        do = "give at least one batch and one step"
        raise ProfileError("there are no batches to estimate with", do=do)


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


_CHUNK: Final = 8192
"""Values per chunk: the largest block size of any codec."""
_CHUNKS: Final = 16


def of_gradients(gradients: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return the variance that each codec of a plan except FP32 adds, by parameter.

    It is in closed form for stochastic rounding, and extrapolated from chunks for large gradients.
    Parameters with empty or non-finite gradients are omitted.
    """
    codecs = [codec_named(name) for name in CODECS if name != PLAIN]
    result: dict[str, dict[str, float]] = {}
    for name, gradient in gradients.items():
        if not gradient.numel() or not bool(gradient.isfinite().all()):
            continue
        result[name] = {}
        for codec in codecs:
            fitted = codec.fitted(gradient.shape)
            values = fitted.columns(gradient)
            if values is None:
                values = gradient
            values = values.detach().float().cpu().flatten()
            part = _part(values.contiguous())
            result[name][codec.name] = fitted.variance(part) * values.numel() / part.numel()
    return result


def _part(values: Tensor) -> Tensor:
    if values.numel() <= _CHUNK * _CHUNKS:
        return values
    chunks = values[: values.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK)
    index = torch.linspace(0, len(chunks) - 1, _CHUNKS).round().long()
    return chunks[index].flatten()
