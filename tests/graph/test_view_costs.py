"""Bytes in the cost of an operator: the bytes that torch moves, and zero for a view."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qsync_fx
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import tensors


class Shapes(nn.Module):
    """Shape changes by views, by copies, and by operators that do either."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        heads = y.view(2, 4, 2, 8).transpose(1, 2)
        joined = heads.reshape(2, 2, 32) + 1
        transposed = y.transpose(1, 2).contiguous()
        flat = y.contiguous().flatten(1).expand(2, 64).float()
        left, right = y.chunk(2, -1)
        first, *_ = y.unbind(0)
        written = torch.relu_(y[:, 1:] * 2).unsqueeze_(0).squeeze(0)
        cut = torch.cat([left, right], -1).narrow(1, 0, 2).clone()
        return (
            self.last(joined.reshape(2, 4, 16)),
            transposed * 2,
            flat * 2,
            left * right,
            first * 2,
            written * 2,
            cut,
        )


class Moves(fx.Interpreter):
    """Interpreter that records whether each operator returns unmodified memory of its operands."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.views: dict[str, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        before = [t.clone() for t in tensors([*args, *kwargs.values()])]
        result = super().run_node(n)
        if n in node_metadata.NOTE:
            operands = tensors([*args, *kwargs.values()])
            untouched = all(
                torch.equal(t.flatten(), was.flatten())
                for t, was in zip(operands, before, strict=True)
            )
            memory = {t.untyped_storage().data_ptr() for t in operands}
            pointers = [t.untyped_storage().data_ptr() for t in tensors(result)]
            self.views[str(node_metadata.NOTE[n].id)] = untouched and all(
                pointer in memory for pointer in pointers
            )
        return result


def real(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).normal_()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_an_operator_that_gives_back_its_operands_memory_moves_no_bytes(precision: str) -> None:
    explanation = qsync_fx.explain(
        Shapes(), torch.randn(2, 4, 16), options={"precision": precision}
    )
    module = explanation.graph_module("annotate_cost")
    inputs = [real(node.meta["val"]) for node in module.graph.nodes if node.op == "placeholder"]
    moves = Moves(module)
    with torch.no_grad():
        moves.run(*inputs)
    costs = {str(op.id): op.note.cost for op in explanation.operators}
    assert {name for name, cost in costs.items() if cost is not None and cost.bytes == 0} == {
        name for name, view in moves.views.items() if view
    }
    assert {"/view@first", "/chunk@first", "/expand@first"} <= {
        name for name, view in moves.views.items() if view
    }
    assert costs["/reshape@first"] is not None
    assert costs["/reshape@first"].forward.bytes == 2 * 128 * (4 if precision == "fp32" else 2), (
        "the reshape copies its operand"
    )
    # Only a narrow format needs a cast to fp32.
    assert (costs["/to@first"].bytes == 0) == (precision == "fp32")


def test_views_of_symbolic_sizes_move_no_bytes() -> None:
    class Heads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                x.view(x.shape[0], 4, 2, 8).transpose(1, 2).reshape(x.shape[0], 2, 32) + 1
            ).flatten(1)

    x = torch.randn(3, 4, 16)
    torch._dynamo.mark_dynamic(x, 0)
    costs = {
        str(op.id): op.note.cost
        for op in qsync_fx.explain(Heads(), x, options={"precision": "fp32"}).operators
    }
    assert {name: cost.bytes for name, cost in costs.items() if isinstance(cost.bytes, int)} == {
        "/view": 0,
        "/transpose": 0,
        "/flatten": 0,
    }
    (batch,) = costs["/reshape"].bytes.free_symbols
    assert str(batch) == "batch"
    assert costs["/reshape"].bytes == costs["/add"].bytes == 2 * 4 * 64 * batch
