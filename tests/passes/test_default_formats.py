"""Default formats: 16 bits for layers large enough to be faster, FP32 for smaller ones, and the
formats of operators between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.devices import format_support
from qsync_fx.errors import PlanWarning

ROWS = 512
WIDE = 128
"""Channels. For 512 rows, BF16 pays from 128 to 128 channels, not from 128 to 16 or 16 to 128."""


@pytest.fixture(autouse=True)
def unit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patch the CPU to have a BF16 unit."""
    monkeypatch.setattr(format_support, "native_bf16_unit", lambda: True)
    format_support.forget()
    yield
    monkeypatch.undo()
    format_support.forget()


def found(model: nn.Module, *inputs: Tensor, **options: Any) -> dict[str, tuple[str, str]]:
    """Return the precision and the reason of each operator."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        explained = qsync_fx.explain(model.train(), *inputs, options=options)
    return {
        op.id.module or str(op.id): (str(op.precision), op.reason) for op in explained.operators
    }


def formats(model: nn.Module, *inputs: Tensor, **options: Any) -> dict[str, str]:
    return {name: fmt for name, (fmt, _) in found(model, *inputs, **options).items()}


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)
    )


def test_small_model_is_in_fp32_with_a_reason() -> None:
    layers = found(perceptron(16), torch.randn(8, 16))
    assert {fmt for fmt, _ in layers.values()} == {"fp32"}
    default = "no precision was requested, and this is the default of the device"
    assert (
        layers["0"][1] == f"{default}; 8 x 16 x 16 is too small for bf16 to pay, so it runs in fp32"
    )
    assert (
        layers["2"][1]
        == f"{default}; its neighbours are too small for bf16 to be faster, so it runs in fp32"
    )


def test_large_model_is_in_bf16() -> None:
    assert ROWS * WIDE * WIDE >= cpu_kernels.ENOUGH_WORK[16] > ROWS * WIDE * 16
    assert set(formats(perceptron(WIDE), torch.randn(ROWS, WIDE)).values()) == {"bf16"}


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"plan": qsync_fx.Plan.uniform("bf16")},
        {"plan": qsync_fx.Plan("bf16")},
    ],
)
def test_requested_precision_is_preserved(options: dict[str, Any]) -> None:
    assert set(formats(perceptron(16), torch.randn(8, 16), **options).values()) == {"bf16"}


def test_a_region_of_the_model_stays() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                inside = self.inside(x)
            return inside, self.outside(x)

    layers = formats(Region(), torch.randn(8, 16))
    assert layers["inside"] == "bf16" and layers["outside"] == "fp32"


def test_single_row_is_in_fp32_at_any_size() -> None:
    ((fmt, reason),) = found(nn.Linear(2048, 2048), torch.randn(1, 2048)).values()
    assert fmt == "fp32" and "1 x 2048 x 2048 is one row" in reason


def test_few_rows_of_a_large_weight_are_in_fp32() -> None:
    """The conversion of a large weight costs more than the product of few rows saves."""
    for rows, width, expected in (
        (16, 4096, "fp32"),
        (cpu_kernels.FEW_ROWS, 4096, "bf16"),
        (16, 2048, "bf16"),
    ):
        assert rows * width * width >= cpu_kernels.ENOUGH_WORK[16]
        with torch.device("meta"):
            layer = nn.Linear(width, width, bias=False)
        ((fmt, reason),) = found(layer.to_empty(device="cpu"), torch.empty(rows, width)).values()
        assert fmt == expected, (rows, width)
        assert (f"{rows} x 4096 x 4096 is few rows for a weight that large" in reason) == (
            expected == "fp32"
        )


def test_convolutions_count_as_products() -> None:
    """A convolution with eight channels pays on large images only; groups shorten its sums."""
    for image, groups, expected in ((32, 1, "bf16"), (8, 1, "fp32"), (32, 8, "fp32")):
        layer = nn.Conv2d(8, 8, 3, groups=groups, padding=1)
        ((fmt, reason),) = found(layer, torch.randn(8, 8, image, image)).values()
        assert fmt == expected, (image, groups)
    assert f"{8 * 32 * 32} x 8 x 9 is too small for bf16 to pay" in reason
    ((_, reason),) = found(nn.ConvTranspose2d(8, 16, 2, stride=2), torch.randn(8, 8, 8, 8)).values()
    assert f"{8 * 8 * 8} x 8 x 64 is too small" in reason


class Gated(nn.Module):
    """A large layer, its product with a gate of two small layers as in squeeze-and-excitation, and
    a small head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.tail = (
            nn.Linear(WIDE, WIDE),
            nn.LayerNorm(WIDE),
            nn.Linear(WIDE, WIDE),
        )
        self.squeeze, self.excite, self.head = (
            nn.Linear(WIDE, 16),
            nn.Linear(16, WIDE),
            nn.Linear(WIDE, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        large = self.norm(self.body(x)).relu()
        gate = self.excite(self.squeeze(large.mean(1)).relu()).sigmoid()
        logits: Tensor = self.head(self.tail(large * gate.unsqueeze(1)).mean(1))
        return logits


def test_small_gate_does_not_widen_large_layers() -> None:
    layers = found(Gated(), torch.randn(8, ROWS // 8, WIDE))
    assert {name: fmt for name, (fmt, _) in layers.items() if not name.startswith("/")} == {
        **dict.fromkeys(("body", "norm", "excite", "tail"), "bf16"),
        **dict.fromkeys(("squeeze", "head"), "fp32"),
    }
    because = (
        "8 x 128 x 16 is too small for bf16 to pay, but its result is used in bf16 by "
        "body/linear, so it stays"
    )
    assert layers["excite"][1].endswith(because)
    assert layers["/mul@excite"][0] == "bf16"


class Words(nn.Module):
    """Embeddings, attention with a residual connection, and a head for many words."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(32, width)
        self.first, self.parts, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        parts = (
            part.view(*ids.shape, 2, -1).transpose(1, 2)
            for part in self.parts(self.first(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(*parts)
        logits: Tensor = self.head(
            self.last(x + self.out(attended.transpose(1, 2).reshape(x.shape)))
        )
        return logits


def test_products_without_a_weight_follow_their_neighbours() -> None:
    ids = torch.randint(100, (4, 32))
    small = found(Words(16, 100), ids)
    assert {fmt for _, (fmt, _) in small.items()} == {"fp32"}
    # A large head and the norm that it reads run in BF16; the layers before them are too small.
    headed = formats(Words(16, 10_000), ids)
    assert headed["head"] == headed["last"] == "bf16"
    for name in ("words", "places", "first", "parts", "out"):
        assert headed[name] == "fp32", name
    assert headed["/scaled_dot_product_attention@parts"] == "fp32"


def test_it_trains_as_in_fp32() -> None:
    torch.manual_seed(0)
    model, x = perceptron(16), torch.randn(8, 16)
    gradients = []
    for options in ({}, {"precision": "fp32"}):
        model.zero_grad()
        torch.compile(model, backend="qsync", options={"inner_backend": "aot_eager", **options})(
            x
        ).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        assert actual is not None and expected is not None and torch.equal(actual, expected)


def test_checkpointed_layers_get_equal_formats() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated = Gated()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.gated, x, use_reentrant=False)
            return output

    x = torch.randn(8, ROWS // 8, WIDE)
    inside = formats(Checkpointed(), x)
    layers = {name: fmt for name, fmt in formats(Gated(), x).items() if not name.startswith("/")}
    assert {name: inside[f"gated.{name}"] for name in layers} == layers
