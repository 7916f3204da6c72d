"""Positions of casts: one for all readers of a tensor, a new one after a write, none if two would
cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsync_fx


def test_no_cast_outlives_a_write() -> None:
    """A write to `x` is between two readers: each needs its own cast."""

    def model(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        x = x.clone()
        view = x[0:1]
        first = nn.functional.linear(x, weight)
        view.mul_(2)
        second = nn.functional.linear(x, weight)
        return first + second + other

    inputs = [torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)]
    text = qsync_fx.explain(model, *inputs, options={"precision": "bf16"}).graph()
    compiled = torch.compile(
        model, backend="qsync", options={"precision": "bf16", "inner_backend": "aot_eager"}
    )
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0.05, atol=0.2)
    assert text.count("aten.to.dtype(%clone, bfloat16)") == 2


def test_a_tensor_is_cast_once_for_all_its_readers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    for precision, cast in (
        ("bf16", "aten.to.dtype(%x, bfloat16)"),
        ("int8", "qsync.quantize(%x,"),
    ):
        text = qsync_fx.explain(
            Attention(), torch.randn(2, 4, 8), options={"precision": precision}
        ).graph()
        assert text.count(cast) == 1


def test_write_ends_sharing_of_aliased_casts_only() -> None:
    """Between the two readers of the block's input, a batch norm writes its statistics and counts
    its batches.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.beside = (
                nn.Conv2d(4, 4, 1),
                nn.BatchNorm2d(4),
                nn.Conv2d(4, 4, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            return self.norm(self.conv(x)) + self.beside(x)

    for precision, cast in (
        ("bf16", "aten.to.dtype(%relu, bfloat16)"),
        ("int8", "qsync.quantize(%relu,"),
    ):
        text = qsync_fx.explain(
            Block(), torch.randn(2, 4, 3, 3), options={"precision": precision}
        ).graph()
        assert text.count("aten.add_.Tensor") == 1
        assert text.count(cast) == 1

    def statistics(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        before = nn.functional.linear(mean, weight)
        y = nn.functional.batch_norm(x, mean, var, training=True)
        return before + nn.functional.linear(mean, weight) + y

    inputs = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(8), torch.ones(8)
    text = qsync_fx.explain(statistics, *inputs, options={"precision": "bf16"}).graph()
    assert text.count("aten.to.dtype(%mean, bfloat16)") == 2
    assert text.count("aten.to.dtype(%weight, bfloat16)") == 1


def test_operators_without_a_lowering_share_their_casts() -> None:
    def model(x: Tensor, first: Tensor, second: Tensor, added: Tensor) -> Tensor:
        left = torch.addmm(added, x, first, beta=0.5)
        return left + torch.addmm(added, x, second, beta=0.5) + torch.mm(x, first)

    inputs = [torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(4, 8)]
    text = qsync_fx.explain(model, *inputs, options={"precision": "int8"}).graph()
    for name in ("x", "first", "second", "added"):
        assert text.count(f"aten.to.dtype(%{name}, bfloat16)") == 1


def test_inverse_casts_cancel() -> None:
    """Autocast's BF16 cast before an operator planned in FP32 is removed."""

    def model(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(x, weight)

    explanation = qsync_fx.explain(
        model, torch.randn(4, 8), torch.randn(8, 8), options={"precision": "fp32"}
    )
    assert "to.dtype(%x" in explanation.graph("autocast")
    assert "bfloat16)" not in explanation.graph("insert_casts").partition("linear")[0]
