"""Products with a parameter, also after views and casts of it, and the reasons for all other
products. Plans, reports and costs use the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qsync_fx
from qsync_fx.graph.node_metadata import PATH
from tests.support import tiers
from tests.support.computing.weight_products import adjustable


class Two(nn.Module):
    """Module with parameters, a buffer, and the product of a test."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.product = product
        self.w = nn.Parameter(torch.randn(7, 5))
        self.square = nn.Parameter(torch.randn(7, 7))
        self.cube = nn.Parameter(torch.randn(4, 7, 7))
        self.vector = nn.Parameter(torch.randn(7))
        self.register_buffer("table", torch.randn(7, 5))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(7, 5))])

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self, x)


def explained(product: Callable[..., Tensor], x: Tensor, **options: object) -> qsync_fx.Explanation:
    return qsync_fx.explain(Two(product), x, options={"precision": "int8", **options})


@pytest.mark.parametrize(
    "product",
    [
        lambda net, x: x @ net.w.detach(),
        lambda net, x: x @ net.w.clone().contiguous(),
        lambda net, x: x @ net.w.t().reshape(7, 5),
        lambda net, x: x.bfloat16() @ net.w.to(torch.bfloat16),
        lambda net, x: x @ net.square[:, :5],
        lambda net, x: x @ net.square.chunk(2, 1)[1],
        lambda net, x: x @ net.cube[2],
        lambda net, x: x @ net.cube.unbind(0)[1],
        lambda net, x: x.expand(4, 3, 7) @ net.w.expand(4, 7, 5),
        lambda net, x: x @ net.parts[0],
        lambda net, x: torch.utils.checkpoint.checkpoint(
            lambda x: x @ net.w, x, use_reentrant=False
        ),
    ],
)
def test_moved_or_converted_parameter_is_a_weight(
    product: Callable[..., Tensor],
) -> None:
    operators = adjustable(explained(product, torch.randn(3, 7, requires_grad=True)))
    assert [each[1:] for each in operators] == [("int8", "plan: uniform int8")]


@pytest.mark.parametrize(
    ("product", "row", "says"),
    [
        (lambda net, x: x @ x.t(), "a product of two activations",
        "int8 applies to products with a weight, matmul runs in bf16"),
        (lambda net, x: net.w.t() @ net.square + x[:5], "a product of two parameters",
        "both of its factors are parameters"),
        (lambda net, x: x @ net.table, "a product with a buffer", "is no parameter"),
        (lambda net, x: x @ (net.w * 2), "computes from its parameters", "is no parameter"),
        (lambda net, x: x @ net.vector, "not as a layer's",
        "its weight is a vector, so its output has no channels"),
        (lambda net, x: torch.einsum("bi,ij->ij", x, net.square), "not as a layer's",
        "only one of its factors has"),
        (lambda net, x: torch.einsum("bi,io->bio", x, net.w), "not as a layer's",
        "it sums over nothing"),
        (lambda net, x: torch.einsum("bi,ii->bi", x, net.square), "not as a layer's",
        "it takes a diagonal"),
        (lambda net, x: torch.einsum("bi,ij,jk->bk", x, net.square, net.w), "not as a layer's",
        "3 tensors at once"),
        (lambda net, x: torch.addmm(x, x, net.square, beta=2), "not as a layer's",
        "it weighs its bias"),
        (lambda net, x: torch.addmm(x, x, net.square), "not as a layer's",
        "something else than a bias"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_other_products_have_a_reason(product: Callable[..., Tensor], row: str, says: str) -> None:
    explanation = explained(product, torch.randn(7, 7, requires_grad=True))
    (operator,) = [op for op in explanation.operators if op.kind == "adjustable"]
    assert row in operator.row.reason and says in operator.reason
    assert str(operator.precision) == "bf16" and "runs in bf16" in operator.reason


def test_a_parameter_that_two_products_read_is_quantized_once() -> None:
    def product(net: Any, x: Tensor) -> Tensor:
        return (x @ net.w) @ net.w.t() + F.linear(x @ net.w, net.w)

    net, x = Two(product), torch.randn(3, 7, requires_grad=True)
    explanation = qsync_fx.explain(net, x, options={"precision": "int8"})
    assert {precision for _, precision, _ in adjustable(explanation)} == {"int8"}
    quantized = [
        node.args[0].name
        for node in explanation.graph_module().graph.nodes
        if "quantize" in str(node.target)
    ]
    assert quantized.count("w") == 1
    options = {"precision": "int8", "rounding": "nearest", "inner_backend": "aot_eager"}
    y = torch.compile(net, backend="qsync", options=options)(x)
    y.sum().backward()
    wanted = torch.autograd.grad(net(x).sum(), net.w)[0]
    assert net.w.grad is not None and (net.w.grad - wanted).norm() < 0.03 * wanted.norm()


def test_plans_reports_and_costs_know_the_weight() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Two(lambda net, x: torch.einsum("io,bi->bo", net.w, x))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    net, x = Outer(), torch.randn(3, 7, requires_grad=True)
    plan = qsync_fx.Plan(operators={"inner/einsum": "int8"})
    explanation = qsync_fx.explain(net, x, options={"plan": plan})
    assert [each[:2] for each in adjustable(explanation)] == [("inner/einsum", "int8")]
    (site,) = explanation.graphs[0].costing.flow.sites
    roles = {PATH.get(operand.node): operand.role for operand in site.operands}
    assert roles["inner.w"] == "weight" and set(roles.values()) == {"weight", "tensors.1"}
    (operator,) = explanation.operators
    cost = operator.note.cost
    assert cost is not None
    # Both operands are saved with one byte per value; forward and gradients are a product each.
    assert (
        cost.forward.flops
        == cost.weight_gradient.flops
        == cost.input_gradient.flops
        == 2 * 3 * 7 * 5
    )
    assert sorted(cost.saved.values()) == [3 * 7, 7 * 5]


@tiers.ALL
@pytest.mark.filterwarnings("ignore")
def test_transformers_products_with_parameters_are_int8() -> None:
    """Llama 4 computes experts with `bmm`, XLNet layers with `einsum`, GPT-2 with `addmm`."""
    import transformers

    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = {
        "intermediate_size": 48,
        "intermediate_size_mlp": 48,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    }
    models = {
        "/bmm": transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(
                hidden_size=32, head_dim=8, pad_token_id=0, **llama, **sizes
            )
        ),
        "/einsum": transformers.XLNetModel(
            transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=4, d_inner=48)
        ),
        "/addmm": transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
        ),
    }
    for name, model in models.items():
        explanation = qsync_fx.explain(
            model, torch.randint(0, 64, (2, 9)), options={"precision": "int8"}
        )
        ours = [op for op in explanation.operators if name in str(op.id)]
        with_weight = [op for op in ours if op.row.scaled]
        assert with_weight and {str(op.precision) for op in with_weight} == {"int8"}, name
        for op in ours:
            # XLNet computes its position keys from a parameter alone.
            others = (
                "a product of two activations",
                "a product with a buffer, or with what the model computes",
            )
            assert op.row.scaled or op.row.reason.startswith(others), op.id
