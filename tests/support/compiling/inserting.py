"""Model, pass and training step for the tests of inserted nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import qsync_fx
from qsync_fx.graph import Operator, PrecisionGraph

PLACES = (
    "normalize",
    "autocast",
    "classify",
    "assign",
    "cascade",
    "insert_casts",
    "lower",
    "annotate_cost",
)


Put = Callable[[PrecisionGraph, fx.Node], fx.Node]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.body(x)))


def behind(
    operator: str, put: Put, after: str = "normalize", name: str = "tap"
) -> qsync_fx.GraphPass:
    """Return a pass that inserts a node between an operator and its readers."""

    def run(graph: PrecisionGraph) -> None:
        operation = next(op for op in graph.operators() if str(op.id) == operator)
        users = list(operation.node.users)
        with operation.graph.graph.inserting_before(operation.node.next):
            new = put(operation.graph, operation.node)
        for user in users:
            user.replace_input_with(operation.node, new)

    return qsync_fx.graph_pass(after=after, name=name)(run)


def relu(graph: PrecisionGraph, node: fx.Node) -> fx.Node:
    return graph.graph.call_function(torch.ops.aten.relu.default, (node,))


def explain(
    *passes: object, model: nn.Module | None = None, **options: object
) -> qsync_fx.Explanation:
    return qsync_fx.explain(
        model or Net(), torch.randn(2, 8), options={"passes": list(passes), **options}
    )


def put_in(explanation: qsync_fx.Explanation) -> dict[str, Operator]:
    return {str(op.id): op for op in explanation.operators if op.note.by}


def trained(
    model: nn.Module, x: Tensor, run: Callable[..., Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    y = model(x) if run is None else run(x)
    y.square().sum().backward()
    return y.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
