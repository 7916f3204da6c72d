"""Baseline indicators: the sensitivity methods "depth", "fisher", "hessian" and "random".

Importing this module registers them. A step of the first two is one forward and one backward pass.
The numbers of "hessian", HAWQ's indicator, only rank operators. "random" is a baseline of QSync: an
operator's value is drawn once for its narrowest precision, and halved for each next one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.formats import FORMATS
from qsync_fx.ops.spec import Place
from qsync_fx.predictor.indicator.rounding_variance import Product, product_noise
from qsync_fx.profiler.sensitivity.closed_form_terms import Formulas, ObservedCall
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec, register
from qsync_fx.profiler.sensitivity.second_order import factored
from qsync_fx.profiler.tensor_capture.gradient_probes import Erring, erring
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, Taps, tapped


def omega(
    gamma: float,
    depth: int,
    deepest: int,
    forward: float,
    weight_gradient: float,
    input_gradient: float,
) -> float:
    """Return the variance that an operator at depth d of L adds to the gradients.

    An error of its forward result affects the gradients of the L - d + 1 operators from there on,
    and an error of its input gradient the gradients of the d - 1 operators before it:

        omega = gamma**2 (L - d + 1) forward + weight_gradient + (d - 1) input_gradient

    QSync, Eq. (3), has the two weights exchanged: it counts the noise that an operator receives,
    not the noise that it causes.

    The variances are sums over all elements, gamma is 1/N for the mean loss over N samples.
    """
    behind = gamma**2 * (deepest - depth + 1) * forward
    return behind + weight_gradient + (depth - 1) * input_gradient


def gradient_products(product: Product, a: Tensor, b: Tensor) -> tuple[Product, Product]:
    """Return the two backward products of a layer, both linear in each factor.

    The first maps (gradient, b) to the gradient of `a`, the second (gradient, a) to that for `b`.
    """

    def backward(forward: Product, like: Tensor) -> Product:
        def gradient_of(gradient: Tensor, other: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = torch.zeros_like(like, dtype=other.dtype).requires_grad_()
                result = forward(leaf, other)
                return torch.autograd.grad(result, leaf, gradient.to(other.dtype))[0]

        return gradient_of

    return backward(product, a), backward(lambda leaf, other: product(other, leaf), b)


def weight_gradient_noise(
    product: Product, x: Tensor, weight: Tensor, gradient: Tensor, of_x: Tensor, of_gradient: Tensor
) -> Tensor:
    """Return the variance of each element of a weight's gradient."""
    _, of_weight = gradient_products(product, x, weight)
    return product_noise(of_weight, gradient, x, of_gradient, of_x)


def input_gradient_noise(
    product: Product,
    x: Tensor,
    weight: Tensor,
    gradient: Tensor,
    of_weight: Tensor,
    of_gradient: Tensor,
) -> Tensor:
    """Return the variance of each element of an input's gradient, which QSync, Eq. (5), omits."""
    of_x, _ = gradient_products(product, x, weight)
    return product_noise(of_x, gradient, weight, of_gradient, of_weight)


def by_depth(observed: ObservedCall, name: str, change: RoundingSite) -> float:
    """Return the closed form of `omega` with the exact variances of each product."""
    errors = erring(observed.call, change, observed.gradients)
    x, weight = (
        (_square(errors, place) for place in observed.call.row.scaled)
        if observed.call.row.scaled
        else (None, None)
    )
    g = _square(errors, OUTPUT, gradient=True)
    rest = sum(
        float(e.square.sum())
        for e in errors
        if not e.gradient and e.place not in observed.call.row.scaled
    )
    incoming = observed.gradients.get(OUTPUT)
    if x is None or weight is None or incoming is None:
        backward = sum(float(e.square.sum()) for e in errors if e.gradient)
        return omega(observed.gamma, observed.depth, observed.deepest, rest, 0.0, backward)
    product, a, b = factored(observed.call)
    nothing = torch.zeros_like(incoming, dtype=torch.float64)
    forward = float(product_noise(product, a, b, x, weight).sum())
    to_weight = float(
        weight_gradient_noise(product, a, b, incoming, x, nothing if g is None else g).sum()
    )
    to_input = float(
        input_gradient_noise(product, a, b, incoming, weight, nothing if g is None else g).sum()
    )
    return omega(
        observed.gamma, observed.depth, observed.deepest, forward + rest, to_weight, to_input
    )


def by_fisher(observed: ObservedCall, name: str, change: RoundingSite) -> float:
    """Return the mean squared first-order change of the loss: squared gradients * variance."""
    result = 0.0
    for item in erring(observed.call, change, observed.gradients):
        slope = observed.gradients.get(item.place)
        if not item.gradient and slope is not None:
            result += float((item.square * slope.double().square()).sum())
    return result


def _square(errors: list[Erring], place: Place, gradient: bool = False) -> Tensor | None:
    return next((e.square for e in errors if e.place == place and e.gradient is gradient), None)


@dataclass(frozen=True)
class HessianIndicator:
    """HAWQ's indicator: largest eigenvalue of a weight's Hessian / weight size * squared error.

    Operators without a weight contribute 0. The power iteration continues from step to step.
    """

    iterations: int = 4
    _vectors: dict[str, Tensor] = field(default_factory=dict)

    def look(self, step: GradientStep) -> dict[Key, float]:
        weights: dict[str, Place] = {}
        for operator in step.captured.operators:
            if operator.row is not None and operator.row.scaled:
                weights[str(operator.id)] = operator.row.scaled[1]
        taps = Taps({name: {place} for name, place in weights.items()})
        step.again(0)
        with step.captured.running(tapped(taps.tap)):
            loss = step.loss()
        tensors = [call.tensors[weights[call.operator]] for call in taps.calls]
        edges = [tensor.edge for tensor in tensors]
        slopes: tuple[Tensor | None, ...] = torch.autograd.grad(
            loss, edges, create_graph=True, allow_unused=True
        )
        sums: dict[Key, float] = defaultdict(float)
        for call, tensor, slope in zip(taps.calls, tensors, slopes, strict=True):
            largest = 0.0
            if slope is not None and slope.requires_grad:
                largest = self._largest(call.operator, tensor.edge, slope, step)
            for name, site in step.changes[call.operator].items():
                errors = [e for e in erring(call, site, {}) if e.place == weights[call.operator]]
                square = sum(float(error.square.sum()) for error in errors)
                sums[call.operator, name] += largest / tensor.value.numel() * square
        return dict(sums)

    def _largest(self, name: str, edge: GradientEdge, slope: Tensor, step: GradientStep) -> float:
        vector = self._vectors.get(name)
        if vector is None or vector.shape != slope.shape:
            vector = torch.randn(slope.shape, generator=step.generator).to(slope)
        value = 0.0
        for _ in range(self.iterations):
            vector = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
            result: tuple[Tensor | None, ...] = torch.autograd.grad(
                slope, [edge], vector, retain_graph=True, allow_unused=True
            )
            if result[0] is None:
                return 0.0
            value, vector = float(result[0].norm()), result[0]
        self._vectors[name] = vector
        return value


@dataclass(frozen=True)
class RandomIndicator:
    _drawn: dict[str, float] = field(default_factory=dict)

    def look(self, step: GradientStep) -> dict[Key, float]:
        result: dict[Key, float] = {}
        for name, by in step.changes.items():
            drawn = self._drawn.setdefault(name, float(torch.rand((), generator=step.generator)))
            narrow = [fmt for fmt, change in by.items() if change.places]
            for place, fmt in enumerate(
                sorted(narrow, key=lambda p: (FORMATS[p].bits, FORMATS[p].mantissa))
            ):
                result[name, fmt] = drawn / 2**place
        return result


register(
    MethodSpec(
        "depth",
        lambda: Formulas(by_depth),
        lambda operators, precisions: 2,
    ),
    MethodSpec(
        "fisher",
        lambda: Formulas(by_fisher),
        lambda operators, precisions: 1,
    ),
    MethodSpec(
        "hessian",
        HessianIndicator,
        lambda operators, precisions: 2 + 8 * operators,
        twice=True,
    ),
    MethodSpec(
        "random",
        RandomIndicator,
        lambda operators, precisions: 0,
    ),
)
