"""Conversions that the model itself writes: requests for a dtype, and moves to a device.

A model is traced in its own dtypes, in which both `x.to(device)` and `x.float()` have no effect.
Under a plan they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

import qsync_fx


def format_after(convert: Callable[[Tensor, Tensor], Tensor], precision: str = "bf16") -> str:
    """Return the format of the sum of a product and its converted value."""

    def model(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return convert(y, x) + y

    explanation = qsync_fx.explain(
        model, torch.randn(4, 8), torch.randn(8, 8), options={"precision": precision}
    )
    return next(str(op.precision) for op in explanation.operators if op.id.operator == "add")


NO_WISH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a device": lambda y, x: y.to(x.device),
    "a device by name": lambda y, x: y.to(device="cpu", non_blocking=True),
    "cpu": lambda y, x: y.cpu(),
    "another tensor": lambda y, x: y.to(F.linear(x, x[:, :8].new_ones(8, 8))),
    "a copy": lambda y, x: y.to("cpu", copy=True),
    "type_as": lambda y, x: y.type_as(y),
}
WISHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float": lambda y, x: y.float(),
    "a type": lambda y, x: y.to(torch.float32),
    "device and type": lambda y, x: y.to("cpu", torch.float32),
    "the type of an input": lambda y, x: y.type_as(x),
}


@pytest.mark.parametrize("name", NO_WISH)
def test_conversion_without_a_dtype_preserves_the_format(name: str) -> None:
    assert format_after(NO_WISH[name]) == "bf16"


@pytest.mark.parametrize("name", WISHES)
def test_conversion_with_a_dtype_is_a_request(name: str) -> None:
    assert format_after(WISHES[name]) == "fp32"


def test_requested_dtype_is_preserved_next_to_a_view() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return y.float() * y[0]

    text = qsync_fx.explain(
        model, torch.randn(4, 8), torch.randn(8, 8), options={"precision": "bf16"}
    ).graph()
    assert "f32[4, 8] = aten.to.dtype(%linear, float32)" in text


def test_the_residual_stream_of_gpt2_is_narrow() -> None:
    """GPT-2 moves its position embeddings to the device of its token embeddings before the sum that
    begins the stream.
    """
    config = hf.GPT2Config(
        vocab_size=67,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model, ids = hf.GPT2Model(config).train(), torch.arange(16).reshape(2, 8)
    explanation = qsync_fx.explain(model, ids, options={"precision": "bf16"})
    # Without the sums of the activation function, which add a power that stays in FP32.
    sums = [
        op
        for op in explanation.operators
        if op.id.operator == "add" and not op.id.module.endswith("act")
    ]
    assert len(sums) == 5
    assert {str(op.output) for op in sums} == {"bf16"}
