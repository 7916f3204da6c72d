"""Layouts of operands and images under Inductor, which ignores the layout constraint of an operator
with a layout tag.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from qsync_fx.backend.inductor import layouts
from qsync_fx.backend.inductor.inductor_config import register_with_inductor
from qsync_fx.backend.inductor.layouts import as_it_comes
from qsync_fx.backend.numerics import native
from qsync_fx.devices.cpu_features import multiplied_in_fp32

_LAID_OUT = pytest.mark.skipif(
    bool(multiplied_in_fp32()),
    reason="Inductor lays out images for its own convolutions, which do not run in BF16 here",
)


@pytest.mark.parametrize("name", ["gemm", "conv2d_product", "quantize", "quantize_transposed"])
def test_inductor_requests_operand_strides(name: str) -> None:
    from torch._inductor.lowering import maybe_layout_constraints

    register_with_inductor()
    constraint = maybe_layout_constraints(getattr(torch.ops.qsync, name).default)
    assert (
        constraint is not None
        and constraint.__module__ == "qsync_fx.backend.inductor.inductor_config"
    )


def test_inductor_is_free_with_operators_that_take_any_layout() -> None:
    from torch._inductor.lowering import maybe_layout_constraints

    register_with_inductor()
    assert maybe_layout_constraints(torch.ops.qsync.integer_convolution.default) is None


class Block(nn.Module):
    """Start of a ConvNeXt block: convolutions, then a linear layer on a four-dimensional input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.LayerNorm(channels)
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.up = nn.Linear(channels, 4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.up(self.norm(self.depth(self.first(x)).permute(0, 2, 3, 1)))
        return rows


@_LAID_OUT
def test_row_operands_of_linear_layers_are_quantized_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression test: in a graph with channels-last convolutions, Inductor copied the values
    between quantizer and layer.
    """
    from torch._inductor.utils import run_and_get_code

    n, h, w, c = 2, 5, 7, 24
    strides: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    quantize = native.quantize

    def seen(*arguments: Any) -> tuple[Tensor, Tensor]:
        values, scale = quantize(*arguments)
        strides.setdefault(tuple(values.shape), set()).add(values.stride())
        return values, scale

    monkeypatch.setattr(native, "quantize", seen)
    compiled = torch.compile(Block(c), backend="qsync", options={"precision": "int8"})
    with torch.compiler.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(compiled, torch.randn(n, 3, h, w))
    assert strides[n, c, h, w] == {(h * w * c, 1, w * c, c)}, (
        "the quantized input of a convolution is channels-last"
    )
    assert strides[n, h, w, c] == {(h * w * c, w * c, c, 1)}, (
        "the quantized input of a linear layer is row-major"
    )
    copied = rf"empty_strided_cpu\(\({n * h * w}, {c}\), \({c}, 1\), torch\.int8\)"
    assert not re.search(copied, code), "quantized values are not copied"


class Convolved(nn.Sequential):
    """Two convolutions that preserve the image size."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )


@pytest.mark.parametrize(
    ("precision", "size", "first"),
    [
        ("bf16", 4, True),
        ("fp32", 4, True),
        ("fp32", 16, False),
        pytest.param("bf16", 16, False, marks=_LAID_OUT),
    ],
)
def test_images_keep_their_layout_where_weights_are_far_more(
    precision: str, size: int, first: bool
) -> None:
    """Otherwise contiguous weights would be converted to channels-last in every step."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    n, c = 2, 48
    model, x = Convolved(c), torch.randn(n, c, size, size)
    compiled = torch.compile(model, backend="qsync", options={"precision": precision})
    with torch.compiler.config.patch(force_disable_caches=True):
        y, (code,) = run_and_get_code(compiled, x)
    size_of, weights_of = rf"\({n}, {c}, {size}, {size}\)", rf"\({c}, {c}, 3, 3\)"
    last = (
        rf"{size_of}, \({size * size * c}, 1, {size * c}, {c}\)|{weights_of}, \({9 * c}, 1, "
        rf"{3 * c}, {c}\)"
    )
    assert bool(re.search(last, code)) is not first
    torch.testing.assert_close(y, model(x), atol=0.1, rtol=0.1)
    y.square().sum().backward()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter) and weight.grad is not None
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize(("precision", "comes"), [("int8", True), ("int8_grad", False)])
def test_kernels_of_int8_have_images_laid_out_for_gradients_alone(
    precision: str, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[bool] = []

    def spied(module: fx.GraphModule) -> bool:
        results.append(as_it_comes(module))
        return results[-1]

    monkeypatch.setattr(layouts, "as_it_comes", spied)
    model, x = Convolved(48), torch.randn(2, 48, 4, 4)
    with torch.compiler.config.patch(force_disable_caches=True):
        y = torch.compile(model, backend="qsync", options={"precision": precision})(x)
    assert results == [comes]
    torch.testing.assert_close(y, model(x), atol=0.2, rtol=0.2)


def test_images_with_channels_last_keep_them() -> None:
    from torch._inductor.utils import run_and_get_code

    model, x = Convolved(48).to(memory_format=torch.channels_last), torch.randn(2, 48, 4, 4)  # type: ignore[call-overload]
    compiled = torch.compile(model, backend="qsync", options={"precision": "bf16"})
    with torch.compiler.config.patch(force_disable_caches=True):
        y, _ = run_and_get_code(compiled, x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
