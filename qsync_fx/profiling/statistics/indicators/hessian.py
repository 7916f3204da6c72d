"""The method "hessian": HAWQ's indicator, which QSync compares itself with.

The largest eigenvalue of the Hessian of an operator's weight, by power iteration, divided by the size of the weight and multiplied with
the square error that the format makes of it.

Invariant: operators without a weight add nothing, whatever their format: the method says nothing of activations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.ops import Place
from qsync_fx.profiling.statistics.step import Key, Step
from qsync_fx.profiling.statistics.tensors.local import erring
from qsync_fx.profiling.statistics.tensors.tapped import tapped
from qsync_fx.profiling.statistics.tensors.taps import Taps


@dataclass(frozen=True)
class Hessian:
    """
    Args:
        iterations: of the power method a step; the vector is kept from step to step.
    """

    iterations: int = 4
    _vectors: dict[str, Tensor] = field(default_factory=dict)

    def look(self, step: Step) -> dict[Key, float]:
        weights: dict[str, Place] = {}
        for operator in step.captured.operators:
            if operator.row is not None and operator.row.scaled:
                weights[str(operator.id)] = operator.row.scaled[1]
        taps = Taps({name: {place} for name, place in weights.items()})
        step.again(0)
        with step.captured.running(tapped(taps.tap)):
            loss = step.loss()
        edges = [seen.tensors[weights[seen.operator]].edge for seen in taps.seen]
        slopes: tuple[Tensor | None, ...] = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        sums: dict[Key, float] = {}
        for seen, edge, slope in zip(taps.seen, edges, slopes, strict=True):
            largest = (
                0.0 if slope is None or not slope.requires_grad else self._largest(seen.operator, edge, slope, step)
            )
            size = seen.tensors[weights[seen.operator]].value.numel()
            for name, change in step.changes[seen.operator].items():
                errors = erring(seen, change, {})
                square = sum(float(e.square.sum()) for e in errors if e.place == weights[seen.operator])
                key = seen.operator, name
                sums[key] = sums.get(key, 0.0) + largest / size * square
        return sums

    def _largest(self, name: str, edge: GradientEdge, slope: Tensor, step: Step) -> float:
        """Returns the magnitude of the largest eigenvalue of the derivative of `slope` by what is at `edge`."""
        vector = self._vectors.get(name)
        if vector is None or vector.shape != slope.shape:
            vector = torch.randn(slope.shape, generator=step.generator).to(slope)
        value = 0.0
        for _ in range(self.iterations):
            vector = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                slope, [edge], vector, retain_graph=True, allow_unused=True
            )
            turned = found[0]
            if turned is None:
                return 0.0
            value, vector = float(turned.norm()), turned
        self._vectors[name] = vector
        return value
