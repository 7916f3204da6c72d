"""Training of a transformer in plain torch with each form of attention, under Inductor.

Invariant: the loss and the gradients of all parameters equal eager FP32 within the error of the
format. With dropout the bound is wide, because the random numbers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention as attend

from tests.support import tiers

BATCH, TOKENS, HEADS, WIDTH = 4, 32, 4, 32
CHANNELS = HEADS * WIDTH
CLASSES = 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _mask(query: Tensor) -> Tensor:
    return torch.ones(
        query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device
    ).tril()


def _written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


ATTENTION: dict[str, Attend] = {
    "positional": lambda q, k, v: attend(q, k, v),
    "keyword": lambda q, k, v: attend(query=q, key=k, value=v),
    "scale": lambda q, k, v: attend(q, k, v, scale=0.2),
    "no mask, no dropout": lambda q, k, v: attend(q, k, v, None, 0.0, False),
    "causal": lambda q, k, v: attend(q, k, v, is_causal=True),
    "mask": lambda q, k, v: attend(q, k, v, _mask(q)),
    "mask by keyword": lambda q, k, v: attend(q, k, v, attn_mask=_mask(q)),
    "float mask": lambda q, k, v: attend(
        q, k, v, attn_mask=torch.zeros(TOKENS, TOKENS).masked_fill(~_mask(q), -1e4)
    ),
    "dropout": lambda q, k, v: attend(q, k, v, dropout_p=0.1),
    "contiguous operands": lambda q, k, v: attend(q.contiguous(), k.contiguous(), v.contiguous()),
    "written out": _written_out,
}

SPLIT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2),
    "reshape": lambda x: x.reshape(*x.shape[:2], HEADS, WIDTH).permute(0, 2, 1, 3),
    "unflatten": lambda x: x.unflatten(-1, (HEADS, WIDTH)).movedim(2, 1),
}

MERGE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous, view": lambda y: (
        y.transpose(1, 2).contiguous().view(y.shape[0], y.shape[2], CHANNELS)
    ),
    "view": lambda y: y.transpose(1, 2).view(y.shape[0], y.shape[2], CHANNELS),
    "reshape": lambda y: y.transpose(1, 2).reshape(y.shape[0], y.shape[2], CHANNELS),
    "permute, clone, view": lambda y: (
        y.permute(0, 2, 1, 3)
        .clone(memory_format=torch.contiguous_format)
        .view(y.shape[0], y.shape[2], CHANNELS)
    ),
    "flatten": lambda y: y.transpose(1, 2).flatten(2),
    "only if not contiguous": lambda y: (
        t if (t := y.transpose(1, 2)).is_contiguous() else t.contiguous()
    ).view(y.shape[0], y.shape[2], CHANNELS),
    "as_strided": lambda y: y.as_strided(
        (y.shape[0], y.shape[2], CHANNELS), (y.shape[2] * CHANNELS, CHANNELS, 1)
    ),
    "by its strides": lambda y: y.as_strided(
        (y.shape[0], y.shape[2], HEADS, WIDTH), (y.stride(0), y.stride(2), y.stride(1), y.stride(3))
    ).flatten(2),
    "rearranged": lambda y: rearranged(y),
}
"""Functions from `[batch, heads, tokens, width]` to `[batch, tokens, channels]`.

"view" and "as_strided" rely on the strides of torch's fused kernel.
"""


def rearranged(y: Tensor) -> Tensor:
    """Return "b h t w -> b t (h w)" by einops if it is installed, else by the calls that einops
    makes.
    """
    try:
        from einops import rearrange
    except ImportError:
        batch, heads, tokens, width = y.shape
        return y.permute([0, 2, 1, 3]).reshape([batch, tokens, heads * width])
    result: Tensor = rearrange(y, "b h t w -> b t (h w)")
    return result


class Transformer(nn.Module):
    """Attention block, perceptron block and a linear head on each token: `[B, T, CHANNELS]` to `[B,
    T, CLASSES]`.
    """

    def __init__(self, attention: str, split: str, merge: str) -> None:
        super().__init__()
        self.attention, self.split, self.merge = ATTENTION[attention], SPLIT[split], MERGE[merge]
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.projections, self.out = (
            nn.Linear(CHANNELS, 3 * CHANNELS),
            nn.Linear(CHANNELS, CHANNELS),
        )
        self.up, self.down = nn.Linear(CHANNELS, 2 * CHANNELS), nn.Linear(2 * CHANNELS, CHANNELS)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = map(self.split, self.projections(self.norm1(x)).chunk(3, -1))
        x = x + self.out(self.merge(self.attention(query, key, value)))
        x = x + self.down(gelu(self.up(self.norm2(x))))
        logits: Tensor = self.head(x)
        return logits


ERRORS = {"default": 0.03, "bf16": 0.03, "int8": 0.15, "int8_grad": 0.25}
"""Bound on the error of all gradients together, relative to their norm."""
DROPPING = 0.8
"""The same bound with dropout, which drops other values."""


def cases() -> Iterator[Any]:
    """Yield each attention, split and merge in each format; two of them are in the fast tier."""
    spellings = [(attention, "view", "contiguous, view") for attention in ATTENTION]
    spellings += [("positional", "view", merge) for merge in MERGE]
    spellings += [("positional", split, "contiguous, view") for split in SPLIT]
    spellings += [("causal", "view", merge) for merge in ("view", "as_strided", "rearranged")]
    spellings += [
        ("written out", "reshape", "only if not contiguous"),
        ("dropout", "unflatten", "reshape"),
    ]
    fast = {("positional", "bf16"), ("keyword", "int8")}
    for attention, split, merge in dict.fromkeys(spellings):
        for precision in ERRORS:
            quick = (attention, precision) in fast and (split, merge) == (
                "view",
                "contiguous, view",
            )
            name = f"{attention}-{split}-{merge}-{precision}"
            yield pytest.param(
                attention, split, merge, precision, id=name, marks=() if quick else tiers.ALL
            )


def gradients(model: nn.Module, call: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradients of all parameters and of the input in one flat tensor."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(call(leaf).flatten(0, 1).float(), labels.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    parts = [parameter.grad for parameter in (*model.parameters(), leaf)]
    return loss.detach(), torch.cat([part.flatten() for part in parts if part is not None])


@tiers.one_in(6)
@pytest.mark.parametrize(("attention", "split", "merge", "precision"), list(cases()))
def test_a_transformer_trains_as_in_eager_mode(
    attention: str, split: str, merge: str, precision: str
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(attention, split, merge)
    x, labels = torch.randn(BATCH, TOKENS, CHANNELS), torch.randint(CLASSES, (BATCH, TOKENS))
    options = {} if precision == "default" else {"precision": precision}
    call = torch.compile(model, backend="qsync", options=options)
    expected_loss, expected = gradients(model, model, x, labels)
    for _ in range(2):
        loss, result = gradients(model, call, x, labels)
        bound = DROPPING if attention == "dropout" else ERRORS[precision]
        assert result.shape == expected.shape and result.isfinite().all()
        assert float((result - expected).norm() / expected.norm()) < bound
        torch.testing.assert_close(loss, expected_loss, rtol=bound, atol=0)
