"""Products of 16-bit operands in FP32, which replace torch's on CPUs without AVX-512."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.backend.operators import products_in_fp32
from tests.support.computing.lowered_layers import recorded

aten = torch.ops.aten
CONVOLUTION = [2, 1], [1, 2], [1, 1], False, [0, 0], 1


def calls(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    image, weight = values(3, 6, 9, 7), values(5, 6, 3, 2)
    laid = image.to(memory_format=torch.channels_last)
    gradient = aten.convolution.default(image.float(), weight.float(), None, *CONVOLUTION).to(dtype)
    backward = aten.convolution_backward.default
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    return {
        "mm": (aten.mm.default, (values(5, 7), values(3, 7).t())),
        "addmm": (aten.addmm.default, (values(3), values(5, 7), values(7, 3))),
        "bmm": (aten.bmm.default, (values(2, 5, 7), values(2, 7, 3))),
        "mv": (aten.mv.default, (values(5, 7), values(7))),
        "convolution": (aten.convolution.default, (image, weight, values(5), *CONVOLUTION)),
        "channels last": (aten.convolution.default, (laid, weight, None, *CONVOLUTION)),
        "gradients": (backward, (gradient, image, weight, [5], *CONVOLUTION, [True] * 3)),
        "one gradient": (
            backward,
            (gradient, laid, weight, None, *CONVOLUTION, [True, False, False]),
        ),
        "attention": (attention, (*(values(2, 3, 17, 8) for _ in range(3)), 0.0, True)),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", calls(torch.bfloat16))
def test_a_product_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    operator, args = calls(dtype)[name]
    ours = products_in_fp32.IN_FP32[operator]
    wide = [value.float() if isinstance(value, Tensor) else value for value in args]
    expected = torch.utils._pytree.tree_leaves(operator(*wide))
    results = torch.utils._pytree.tree_leaves(ours(*args))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = torch.utils._pytree.tree_leaves(ours(*args))
    assert len(results) == len(expected)
    for result, value, fake in zip(results, expected, fakes, strict=True):
        if value is None:
            assert result is None
            continue
        assert torch.equal(result, value.to(result.dtype))
        assert result.dtype == fake.dtype
        assert result.stride() == fake.stride()
    assert results[0].dtype == dtype


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.convolution(x).flatten(2).mT
        return nn.functional.scaled_dot_product_attention(*[self.linear(tokens).unsqueeze(1)] * 3)


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_compiled_model_uses_them(
    inner: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are close to FP32 within the error of the format, but not equal."""
    monkeypatch.setattr(
        products_in_fp32,
        "widened",
        lambda device: (torch.bfloat16, torch.float16) if device.type == "cpu" else (),
    )
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 9, 9)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    options = {"precision": precision, "inner_backend": inner, "skip_unprofitable": False}
    compiled = torch.compile(model, backend="qsync", options=options)
    loss = compiled(x).square().sum()
    with recorded() as names:
        results = torch.autograd.grad(loss, list(model.parameters()))
    assert "qsync::convolution_backward_in_fp32" in names
    for result, value in zip(results, expected, strict=True):
        assert (result - value).norm() < 0.05 * value.norm()
        assert not torch.equal(result, value)
