"""Grouped matrix products, as in mixture-of-experts models: formats, gradients, and unsupported
devices.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qsync_fx
from qsync_fx.backend.operators import lowerings
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.formats import FORMATS
from qsync_fx.graph import node_metadata
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.ops import row_for
from qsync_fx.plan.operator_id import OpId
from tests.support import tiers
from tests.support.computing.products_in_fp64 import Product
from tests.support.computing.weight_products import SEED, adjustable


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Return a reference grouped product in any dtype. Rows after the last group are zero."""
    result, start = torch.zeros(x.shape[0], w.shape[2], dtype=x.dtype), 0
    for group, end in enumerate(ends.tolist()):
        result[start:end] = x[start:end] @ w[group]
        start = end
    return result


class Experts(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.w = nn.Parameter(torch.randn((4, 8, 16) if transposed else (4, 16, 8)))

    @property
    def weight(self) -> Tensor:
        return self.w.transpose(1, 2) if self.transposed else self.w

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight, offs=ends)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("scaling", ["tensor", "channel"])
@pytest.mark.parametrize("fmt", ["int8", "fp8", "int8_grad"])
@pytest.mark.parametrize(
    ("ends", "transposed"),
    [([3, 3, 9, 11], False), ([1, 4, 5, 9], True), ([0, 0, 0, 0], False), ([0, 11, 11, 11], True)],
)
def test_a_grouped_product_is_a_layer_for_each_group(
    ends: list[int], transposed: bool, fmt: str, scaling: str
) -> None:
    row, gradient, channel = FORMATS[fmt], FORMATS[fmt].gradient, scaling == "channel"
    offs = torch.tensor(ends, dtype=torch.int32)
    # torch traces grouped products only in BF16.
    net, x = (
        Experts(transposed).bfloat16(),
        torch.randn(11, 16, dtype=torch.bfloat16, requires_grad=True),
    )
    explanation = qsync_fx.explain(net, x, offs, options={"precision": fmt, "scaling": scaling})
    assert [each[1:] for each in adjustable(explanation)] == [(fmt, f"plan: uniform {fmt}")]
    options = {
        "precision": fmt,
        "scaling": scaling,
        "rounding": "nearest",
        "inner_backend": "aot_eager",
    }
    y = torch.compile(net, backend="qsync", options=options)(x, offs)
    g = torch.randn_like(y)
    to_x, to_w = torch.autograd.grad(y, [x, net.w], g)
    xq, x_scale = quantize(x.detach(), SEED, 0, fmt, "nearest", [0] if channel else [])
    wq, w_scale = quantize(net.weight.detach(), SEED, 0, fmt, "nearest", [0, 2] if channel else [0])
    a, b = xq.double(), wq.double()
    wide = None if row.kind == "integer" else torch.bfloat16
    Product.of(
        lambda a, b: grouped(a, b, offs), a * x_scale.double(), b * w_scale.double()
    ).assert_met(y, wide)

    def rounded(fold: Tensor | None) -> Tensor:
        value = g if fold is None else g * fold.float()
        if not gradient.scaled:
            return value.to(gradient.dtype).double()
        q, scale = quantize(value, SEED, 0, gradient.name, "nearest", [])
        return q.double() * scale.double()

    def backward(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        return torch.autograd.grad(grouped(a, b, offs) + 0 * (a.sum() + b.sum()), [a, b], g)

    spread = grouped(torch.ones(11, 1), w_scale.expand(4, 1, 8), offs)
    of_rows = torch.arange(11) < ends[-1]
    for_x, for_w = (
        rounded(torch.where(of_rows[:, None], spread, w_scale[-1]) if channel else None),
        rounded(x_scale if channel else None),
    )
    narrow = None if row.gradient.name == "int8" else torch.bfloat16
    left_b, left_a = (b, a) if channel else (b * w_scale.double(), a * x_scale.double())
    Product.of(lambda g, b: backward(g, a, b)[0], for_x, left_b).assert_met(to_x, narrow)
    of_w = Product.of(lambda g, a: backward(g, a, b)[1], for_w, left_a)
    of_w.assert_met(to_w.transpose(1, 2) if transposed else to_w, narrow)


@tiers.ALL
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_of_a_model_train_in_int8(name: str) -> None:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(
        **sizes, **heads, num_local_experts=4, max_position_embeddings=32
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.randint(0, 64, (2, 9))
    explanation = qsync_fx.explain(model, input_ids=ids, labels=ids, options={"precision": "int8"})
    inside = [each for each in adjustable(explanation) if ".experts/" in each[0]]
    assert len(inside) == 2 and all(
        each[1:] == ("int8", "plan: uniform int8") for each in inside
    ), inside
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # The router runs in FP32, so that experts get the same tokens.
    plan = qsync_fx.Plan("fp32", [("**.experts", "int8")])
    compiled = torch.compile(
        model, backend="qsync", options={"plan": plan, "inner_backend": "aot_eager"}
    )
    compiled(input_ids=ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        if "experts" in name and name in expected:
            assert p.grad is not None
            assert 0 < (p.grad - expected[name]).norm() < 0.05 * expected[name].norm(), name
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_grouped_products_use_scaled_formats(device: str) -> None:
    operator = torch.ops.aten._grouped_mm.default
    row = row_for(operator)
    assert row is not None
    graph = fx.Graph()
    shapes: dict[str, tuple[int, ...]] = {"x": (3, 16), "w": (4, 16, 8), "ends": (4,)}
    placeholders = [graph.placeholder(name) for name in shapes]
    node = graph.call_function(operator, (*placeholders,))
    for used, shape in zip((*placeholders, node), (*shapes.values(), (3, 8)), strict=True):
        used.meta["val"] = torch.empty(shape, device=device)
    scaled = dataclasses.replace(row, scaled=(0, 1))
    node_metadata.NOTE[node] = OperatorInfo(OpId("experts", row.name, 0), row.kind, "", scaled)
    refused = lowerings()[row.name].refuses(node)
    assert refused == (None if device == "cpu" else "only the CPU has a grouped product for it")
