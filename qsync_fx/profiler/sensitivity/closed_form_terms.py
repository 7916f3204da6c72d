"""Method "paper": QSync's indicator, from the tensors of one forward and one backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from qsync_fx.formats import precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops.spec import Kind, Place
from qsync_fx.predictor.indicator import formulas
from qsync_fx.predictor.indicator.formulas import depths
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, OperatorCall, Taps, tapped


@dataclass(frozen=True)
class ObservedCall:
    """One call of an operator after a step, with its tensors' gradients by place.

    `gamma` is the derivative of a mean over the batch, 1 / samples.
    """

    call: OperatorCall
    gradients: Mapping[Place, Tensor]
    depth: int
    deepest: int
    gamma: float


@dataclass(frozen=True)
class Formulas:
    """Method that evaluates a closed formula for each call, with the name of a precision."""

    formula: Callable[[ObservedCall, str, RoundingSite], float]

    def look(self, step: GradientStep) -> dict[Key, float]:
        taps = Taps({op: places | {OUTPUT} for op, places in step.places.items()})
        step.again(0)
        with step.captured.running(tapped(taps.tap)):
            loss = step.loss()
        edges = taps.edges
        result = torch.autograd.grad(loss, list(edges.values()), allow_unused=True)
        gradients: dict[int, dict[Place, Tensor]] = defaultdict(dict)
        for (index, place), gradient in zip(edges, result, strict=True):
            if gradient is not None:
                gradients[index][place] = gradient
        depth = model_depths(step)
        deepest = max(depth.values(), default=0)
        sums: dict[Key, float] = defaultdict(float)
        for index, call in enumerate(taps.calls):
            name = call.operator
            observed = ObservedCall(call, gradients[index], depth[name], deepest, 1 / step.samples)
            for fmt, site in step.changes[name].items():
                if site.places:
                    sums[name, fmt] += self.formula(observed, fmt, site)
        return dict(sums)


def model_depths(step: GradientStep) -> dict[str, int]:
    """Return the adjustable operators on the longest path to each one, inclusive."""
    result: dict[str, int] = {}
    for part in step.captured.graphs:
        inputs: dict[fx.Node, list[fx.Node]] = {}
        _flatten(part.graph, {}, inputs)
        notes = {node: node_metadata.NOTE[node] for node in inputs if node in node_metadata.NOTE}
        counted = [node for node, note in notes.items() if note.kind is Kind.ADJUSTABLE]
        before = max(result.values(), default=0)
        for node, depth in depths(inputs, counted).items():
            if node in notes:
                result.setdefault(str(notes[node].id), before + depth)
    return result


def _flatten(
    graph: PrecisionGraph, outside: dict[fx.Node, fx.Node], into: dict[fx.Node, list[fx.Node]]
) -> None:
    """Add the inputs of each node of a graph and its bodies to `into`."""
    for node in graph.nodes:
        read = [outside[node]] if node in outside else list(node.all_input_nodes)
        for body in node_metadata.bodies(node):
            placeholders = [p for p in body.nodes if p.op == "placeholder"]
            pairs = zip(placeholders, node.args[1:], strict=True)
            _flatten(body, {p: used for p, used in pairs if isinstance(used, fx.Node)}, into)
            read = [body.nodes[-1]]
        into[node] = read


def qsync_indicator(observed: ObservedCall, name: str, change: RoundingSite) -> float:
    """Return QSync's indicator, Eq. (3), of one call of an operator.

    Products have the variances of Eq. (4) and (5), even if both factors are activations, which the
    paper leaves in FP32. The paper gives unary operators, such as softmax and norms, the variance
    of their inputs in the forward pass only, and embeddings none.
    """
    fmt = precision(name)
    values = observed.call.tensors
    factors = [values[place].value for place in observed.call.row.scaled if place in values]
    if len(factors) == 2:
        x, weight = (formulas.moments(factor, fmt) for factor in factors)
        gradient = observed.gradients.get(OUTPUT)
        of_gradient = formulas.Moments(0, 0)
        if gradient is not None:
            of_gradient = formulas.moments(gradient, formulas.gradient_format(fmt))
        forward = formulas.forward(x, weight)
        backward = formulas.backward(x, of_gradient)
    else:
        inputs = (tensor for place, tensor in values.items() if place != OUTPUT)
        forward = sum(formulas.moments(tensor.value, fmt).spread for tensor in inputs) / 6
        backward = 0.0
    return formulas.indicator(observed.gamma, observed.depth, observed.deepest, forward, backward)


METHODS: Final = (
    MethodSpec("paper", lambda: Formulas(qsync_indicator), lambda operators, formats: 1),
)
