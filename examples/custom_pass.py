"""Change the plan of a model by a graph pass: small matrix products stay in FP32.

python examples/custom_pass.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import qsync_fx

SMALL = 100_000
"""Weights below which an operator stays in FP32."""


@qsync_fx.graph_pass(after="assign")
def small_products_in_fp32(graph: qsync_fx.PrecisionGraph) -> None:
    """Assign FP32 to operators with few weights."""
    for operator in graph.operators(kind="adjustable"):
        weight = graph.value(operator.node.args[1])
        if weight.numel() < SMALL:
            operator.assign("fp32", reason=f"only {weight.numel()} weights")


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))
    x, target = torch.randn(64, 256), torch.randint(10, (64,))
    options: Any = {"precision": "int8", "passes": [small_products_in_fp32]}

    explanation = qsync_fx.explain(model, x, options=options)
    print(explanation.diff("assign", "small_products_in_fp32"))
    print(explanation)

    compiled = torch.compile(model, backend="qsync", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
