"""Embedding weight gradients under Inductor on the CPU: torch's kernel, values of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import embedding

from qsync_fx.backend.inductor.decompositions import for_inductor
from tests.support import tiers


@pytest.mark.parametrize(
    ("dtype", "padding", "by_frequency"),
    [
        (torch.float32, None, False),
        pytest.param(torch.float32, 3, True, marks=tiers.ALL),
        pytest.param(torch.bfloat16, 3, False, marks=tiers.ALL),
    ],
)
def test_it_is_the_kernel_of_eager_mode(
    dtype: torch.dtype, padding: int | None, by_frequency: bool
) -> None:
    graphs: list[fx.GraphModule] = []

    def compiler(graph: fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(  # type: ignore[no-untyped-call]
        fw_compiler=compiler, bw_compiler=compiler, decompositions=for_inductor(torch.device("cpu"))
    )
    table = torch.randn(11, 7, dtype=dtype, requires_grad=True)
    indices = torch.tensor([[0, 3, 3, 10], [3, 0, 5, 5]])
    weights = torch.randn(2, 4, 7, dtype=dtype)

    def loss(t: Tensor) -> Tensor:
        return (embedding(indices, t, padding, scale_grad_by_freq=by_frequency) * weights).sum()

    (actual,) = torch.autograd.grad(torch.compile(loss, backend=backend)(table), table)
    torch._dynamo.reset()
    # 16-bit gradients are summed in FP32 and rounded once.
    wide = table.detach().float().requires_grad_()
    weights = weights.float()
    (expected,) = torch.autograd.grad(loss(wide), wide)
    assert torch.equal(actual, expected.to(dtype))
    called = [node.target for node in graphs[-1].graph.nodes]
    assert called.count(torch.ops.qsync.embedding_gradient.default) == 1
    assert not any("index_put" in str(target) for target in called)


def test_operator_equals_its_fake_implementation() -> None:
    gradient, indices = torch.randn(2, 3, 5), torch.tensor([[0, 1, 1], [6, 0, 2]])
    torch.library.opcheck(
        torch.ops.qsync.embedding_gradient.default, (gradient, indices, 7, -1, False)
    )


@tiers.ALL
def test_inductor_trains_a_table() -> None:
    torch.manual_seed(0)
    indices = torch.tensor([[0, 3, 3, 10], [3, 0, 5, 5]])
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Embedding(11, 16, padding_idx=3), nn.Linear(16, 4))
        run = (
            torch.compile(model, backend="qsync", options={"precision": "fp32"})
            if compiled
            else model
        )
        run(indices).square().sum().backward()
        gradients.append(model[0].weight.grad)
    torch._dynamo.reset()
    torch.testing.assert_close(*gradients)
    assert not gradients[1][3].any()
