"""Attention masks that broadcast along the keys are copied for kernels that read along the keys;
the tests treat the CPU as such a device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from qsync_fx.backend.operators import attention
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.saved_tensors import FUSED

TOKENS = 16


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.parts = nn.Linear(32, 32)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        query = self.parts(x).view(x.shape[0], TOKENS, 2, 16).transpose(1, 2)
        return attend(query, query, query, self.mask.expand(x.shape[0], 2, TOKENS, TOKENS))


def masks() -> dict[str, Tensor]:
    rows = torch.rand(1, 1, TOKENS, 1) < 0.7
    return {
        "the same for all keys": rows,
        "the same for all": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "of columns": torch.randn(TOKENS, TOKENS).t()[None, None],
        "as it should lie": torch.randn(1, 1, TOKENS, TOKENS),
    }


def strides(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return the strides of the attention masks, and the result."""
    mask_strides: list[tuple[int, ...]] = []
    lay_out = attention.lay_out_masks

    def noting(graph: PrecisionGraph) -> None:
        lay_out(graph)
        for node in graph.nodes:
            if node.target is FUSED:
                mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"]
                assert isinstance(mask, fx.Node)
                mask_strides.append(graph.value(mask).stride())

    monkeypatch.setattr("qsync_fx.backend.compile.lay_out_masks", noting)
    torch._dynamo.reset()
    result = torch.compile(
        model, backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"}
    )(x)
    return mask_strides, result


@pytest.mark.parametrize("name", list(masks()))
def test_only_keys_are_made_contiguous(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Masked(masks()[name]), torch.randn(3, TOKENS, 32)
    ((before,), expected) = strides(monkeypatch, model, x)
    monkeypatch.setattr(attention, "_read_so", lambda device: True)
    ((after,), actual) = strides(monkeypatch, model, x)
    assert after[-1] == 1
    assert all(stride == 0 for stride, was in zip(after[:-2], before[:-2], strict=True) if was == 0)
    assert (before == after) == (name == "as it should lie")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
