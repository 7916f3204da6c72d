"""Methods "paper", "depth" and "fisher", from the tensors of one step, and the baseline "random".

A step of the first three is one forward and one backward pass. "random" is a baseline of QSync: an
operator's value is drawn once for its narrowest precision, and halved for each next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, fx

from qsync_fx.formats import FORMATS, precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops.spec import Kind, Place
from qsync_fx.predictor.indicator import formulas
from qsync_fx.predictor.indicator.formulas import depths, omega
from qsync_fx.predictor.indicator.rounding_variance import (
    input_gradient_noise,
    product_noise,
    weight_gradient_noise,
)
from qsync_fx.profiler.sensitivity.checkpoint import Values
from qsync_fx.profiler.sensitivity.gate_flips import factored
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec
from qsync_fx.profiler.tensor_capture.gradient_probes import Erring, erring
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, OperatorCall, Taps, tapped


@dataclass(frozen=True)
class Looked:
    """One call of an operator after a step.

    Attributes:
        seen: the call.
        gradients: gradients of its tensors, by place.
        depth: depth of the operator.
        deepest: depth of the model.
        gamma: derivative of a mean over the batch, 1 / samples.
    """

    seen: OperatorCall
    gradients: Mapping[Place, Tensor]
    depth: int
    deepest: int
    gamma: float


Formula = Callable[[Looked, str, RoundingSite], float]


@dataclass(frozen=True)
class Formulas:
    """Method that evaluates a closed formula for each call.

    Args:
        formula: contribution of an operator in a precision.
    """

    formula: Formula

    def look(self, step: GradientStep) -> dict[Key, float]:
        taps = Taps({op: places | {OUTPUT} for op, places in step.places.items()})
        step.again(0)
        with step.captured.running(tapped(taps.tap)):
            loss = step.loss()
        edges = taps.edges
        result = torch.autograd.grad(loss, list(edges.values()), allow_unused=True)
        gradients: dict[int, dict[Place, Tensor]] = {}
        for (index, place), g in zip(edges, result, strict=True):
            if g is not None:
                gradients.setdefault(index, {})[place] = g
        deep = model_depths(step)
        deepest = max(deep.values(), default=0)
        sums: dict[Key, float] = {}
        for index, visited in enumerate(taps.seen):
            looked = Looked(
                visited, gradients.get(index, {}), deep[visited.operator], deepest, 1 / step.samples
            )
            for name, change in step.changes[visited.operator].items():
                if change.places:
                    key = visited.operator, name
                    sums[key] = sums.get(key, 0.0) + self.formula(looked, name, change)
        return sums


def model_depths(step: GradientStep) -> dict[str, int]:
    """Return each operator's depth: the adjustable operators on the longest path to it, inclusive.

    Graphs of the model count as consecutive.
    """
    result: dict[str, int] = {}
    for part in step.captured.graphs:
        inputs: dict[fx.Node, list[fx.Node]] = {}
        _flatten(part.graph, {}, inputs)
        ids = {
            node: str(node_metadata.NOTE[node].id) for node in inputs if node in node_metadata.NOTE
        }
        counted = [node for node in ids if node_metadata.NOTE[node].kind is Kind.ADJUSTABLE]
        before = max(result.values(), default=0)
        for node, depth in depths(inputs, counted).items():
            if node in ids:
                result.setdefault(ids[node], before + depth)
    return result


def _flatten(
    graph: PrecisionGraph, outside: dict[fx.Node, fx.Node], into: dict[fx.Node, list[fx.Node]]
) -> None:
    """Add the inputs of each node of a graph and its bodies to `into`."""
    for node in graph.nodes:
        for body in node_metadata.bodies(node):
            placeholders = [p for p in body.nodes if p.op == "placeholder"]
            inputs = {
                p: used
                for p, used in zip(placeholders, node.args[1:], strict=True)
                if isinstance(used, fx.Node)
            }
            _flatten(body, inputs, into)
            into[node] = [body.nodes[-1]]
        if not node_metadata.bodies(node):
            into[node] = [outside[node]] if node in outside else list(node.all_input_nodes)


def qsync_indicator(looked: Looked, name: str, change: RoundingSite) -> float:
    """Return QSync's indicator, Eq. (3), of one call of an operator.

    Products with a weight have the variances of Eq. (4) and (5). The paper gives unary operators,
    such as softmax and norms, the variance of their inputs in the forward pass and none in the
    backward pass; an embedding, which reads indices, has none at all. Products of two activations,
    which the paper leaves in FP32, are treated as products with a weight.
    """
    fmt = precision(name)
    values = looked.seen.tensors
    factors = [
        formulas.moments(values[place].value, fmt)
        for place in looked.seen.row.scaled
        if place in values
    ]
    if len(factors) == 2:
        gradient = looked.gradients.get(OUTPUT)
        of_gradient = formulas.Moments(0, 0)
        if gradient is not None:
            of_gradient = formulas.moments(gradient, formulas.gradient_format(fmt))
        forward = formulas.forward(*factors)
        backward = formulas.backward(factors[0], of_gradient)
    else:
        inputs = (tensor for place, tensor in values.items() if place != OUTPUT)
        forward = sum(formulas.moments(tensor.value, fmt).spread for tensor in inputs) / 6
        backward = 0.0
    return formulas.indicator(looked.gamma, looked.depth, looked.deepest, forward, backward)


def by_depth(looked: Looked, name: str, change: RoundingSite) -> float:
    """Return the closed form of `omega` with the exact variances of each product."""
    errors = erring(looked.seen, change, looked.gradients)
    x, weight = (
        (_square(errors, place) for place in looked.seen.row.scaled)
        if looked.seen.row.scaled
        else (None, None)
    )
    g = _square(errors, OUTPUT, gradient=True)
    rest = sum(
        float(e.square.sum())
        for e in errors
        if not e.gradient and e.place not in looked.seen.row.scaled
    )
    incoming = looked.gradients.get(OUTPUT)
    if x is None or weight is None or incoming is None:
        backward = sum(float(e.square.sum()) for e in errors if e.gradient)
        return omega(looked.gamma, looked.depth, looked.deepest, rest, 0.0, backward)
    product, a, b = factored(looked.seen)
    nothing = torch.zeros_like(incoming, dtype=torch.float64)
    forward = float(product_noise(product, a, b, x, weight).sum())
    to_weight = float(
        weight_gradient_noise(product, a, b, incoming, x, nothing if g is None else g).sum()
    )
    to_input = float(
        input_gradient_noise(product, a, b, incoming, weight, nothing if g is None else g).sum()
    )
    return omega(looked.gamma, looked.depth, looked.deepest, forward + rest, to_weight, to_input)


def by_fisher(looked: Looked, name: str, change: RoundingSite) -> float:
    """Return the mean squared first-order change of the loss: squared gradients * variance."""
    result = 0.0
    for item in erring(looked.seen, change, looked.gradients):
        slope = looked.gradients.get(item.place)
        if not item.gradient and slope is not None:
            result += float((item.square * slope.double().square()).sum())
    return result


def _square(errors: list[Erring], place: Place, gradient: bool = False) -> Tensor | None:
    return next((e.square for e in errors if e.place == place and e.gradient is gradient), None)


@dataclass(frozen=True)
class RandomIndicator:
    _drawn: dict[str, float] = field(default_factory=dict)

    @property
    def learned(self) -> dict[str, Values]:
        return {"drawn": {name: {"": value} for name, value in self._drawn.items()}}

    def learn(self, learned: Mapping[str, Values]) -> None:
        self._drawn.update({name: by[""] for name, by in learned.get("drawn", {}).items()})

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


METHODS: Final = (
    MethodSpec(
        "depth",
        lambda: Formulas(by_depth),
        "exact variances of each product, weighed with how deep the operator stands",
        lambda operators, precisions: 2,
    ),
    MethodSpec(
        "paper",
        lambda: Formulas(qsync_indicator),
        "QSync's equations 3 to 5 to the letter",
        lambda operators, precisions: 1,
    ),
    MethodSpec(
        "fisher",
        lambda: Formulas(by_fisher),
        "squared gradients, weighed with exact variances",
        lambda operators, precisions: 1,
    ),
    MethodSpec(
        "random",
        RandomIndicator,
        "drawn, halved with each wider precision",
        lambda operators, precisions: 0,
    ),
)
