"""The model graph of an explanation: everything that the passes know of a model and that holds for every plan.

Invariant: several graphs, where the model breaks, stand one behind the other, and sizes are in the form that files hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from qsync_fx.codec import Malformed
from qsync_fx.errors import ProfileError
from qsync_fx.graph.algebra import Cost, Size
from qsync_fx.precision import FORMATS, precision
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.model.reachable import reachable
from qsync_fx.predictor.model.reading import Reading
from qsync_fx.predictor.model.sizes import canonical
from qsync_fx.predictor.model.value import ModelGraph, ModelParameter, Operator, StateNames, Value

if TYPE_CHECKING:
    from qsync_fx.explanation import Explanation


def model_graph(explanation: Explanation, formats: Iterable[str] | None = None) -> ModelGraph:
    """Returns the graph of a model that was explained.

    Args:
        formats: what plans will ask for; every format by default. Costs are known of the states that these lead to.

    Raises:
        ProfileError: the model has no graph, or a size that cannot be written down.
        PrecisionError: a format is unknown.
    """
    if not explanation.graphs:
        why = "; ".join(text.partition("\n")[0] for text in explanation.breaks)
        raise ProfileError("Dynamo compiled no part of the model, so there is nothing to predict", where=why or None)
    wanted = tuple(FORMATS) if formats is None else tuple(precision(fmt).name for fmt in dict.fromkeys(formats))
    pinned = {str(op.id): str(op.precision) for op in explanation.operators if op.note.pinned}
    values: list[Value] = []
    graphs: list[Reading] = []
    try:
        with explanation.there():
            for number, part in enumerate(explanation.graphs):
                first = sum(len(graph.operators) for graph in graphs)
                points = graphs[-1].points if graphs else 0
                graphs.append(Reading(part.costing, number, values, first, points, pinned))
            operators = _costed(graphs, wanted)
    except Malformed as wrong:
        do = "explain it with sizes that are numbers: torch._dynamo.mark_static, or inputs of one size"
        raise ProfileError(f"the model{wrong.what}", do=do) from None
    context = explanation.graphs[0].context
    return ModelGraph(
        device=context.options.target or context.device.type,
        operators=tuple(operators),
        values=tuple(values),
        outputs=tuple(read for graph in graphs for read in graph.outputs),
        parameters=tuple(_parameters(graphs, explanation)),
        points=graphs[-1].points,
        formats=wanted,
    )


def _costed(graphs: Sequence[Reading], formats: Sequence[str]) -> list[Operator]:
    operators = [operator for graph in graphs for operator in graph.operators]
    found = [(graph, site) for graph in graphs for site in graph.flow.sites]
    states = reachable(operators, formats)
    known: dict[Size, Size] = {}

    def size(given: Size) -> Size:
        if given not in known:
            known[given] = canonical(given)
        return known[given]

    def cost(graph: Reading, node: fx.Node, state: StateNames) -> Cost:
        own = graph.costing.own(node, state_named(state)).each(size)
        return dataclasses.replace(own, saved={(graph.name(tensor), how): n for (tensor, how), n in own.saved.items()})

    return [
        dataclasses.replace(operator, costs={state: cost(graph, site.node, state) for state in can})
        for operator, (graph, site), can in zip(operators, found, states, strict=True)
    ]


def _parameters(graphs: Sequence[Reading], explanation: Explanation) -> list[ModelParameter]:
    """Those that the model registers, in its order; then those that graphs read and that it does not know by that path."""
    readers: dict[str, list[int]] = {}
    seen: dict[str, torch.nn.Parameter] = {}
    for graph in graphs:
        for path, (parameter, read) in graph.parameters.items():
            seen.setdefault(path, parameter)
            readers.setdefault(path, []).extend(read)
    found = [
        ModelParameter(entry.path, entry.numel, entry.dtype_bytes, entry.trained, tuple(readers.get(entry.path, ())))
        for entry in explanation.parameters
    ]
    known = {parameter.path for parameter in found}
    for path, held in seen.items():
        if path not in known:
            numel, itemsize = int(held.numel()), held.element_size()
            found.append(ModelParameter(path, numel, itemsize, held.requires_grad, tuple(readers[path])))
    return found
