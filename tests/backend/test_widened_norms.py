"""Normalizations with mixed dtypes, which CUDA kernels do not support, run in FP32.

A BERT in BF16 with "aot_eager" failed on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from qsync_fx.backend.numeric_guards import widened

BF16 = torch.bfloat16


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (8,), weight, bias)


def group(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 2, weight, bias)


def by_name(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.layer_norm.default(
        input=x, normalized_shape=[8], weight=weight, bias=bias
    )  # type: ignore[no-any-return]


def native(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return torch.native_layer_norm(x, (8,), weight, bias, 1e-5)


def traced(norm: Callable[..., Any], x: Tensor, *parameters: Tensor) -> Any:
    return make_fx(norm, tracing_mode="fake", pre_dispatch=True)(x, *parameters)


def parameters(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(8).to(dtype), torch.randn(8).to(dtype)


@pytest.mark.parametrize("norm", [layer, group, by_name])
@pytest.mark.parametrize("narrow", [BF16, torch.float16])
def test_parameters_and_input_share_a_dtype(
    norm: Callable[..., Tensor], narrow: torch.dtype
) -> None:
    x, affine = (torch.randn(4, 8) * 3).to(narrow), parameters(torch.float32)
    module = widened(traced(norm, x, *affine))
    (node,) = (node for node in module.graph.nodes if "norm" in str(node.target))
    for operand in node.all_input_nodes:
        assert (
            operand.target == torch.ops.aten.to.dtype or operand.meta["val"].dtype == torch.float32
        )
    assert torch.equal(module(x, *affine), norm(x.float(), *affine).to(narrow))


def test_native_norm_narrows_only_the_activation() -> None:
    x, affine = torch.randn(4, 8).to(BF16), parameters(torch.float32)
    got = widened(traced(native, x, *affine))(x, *affine)
    y, mean, deviation = native(x.float(), *affine)
    assert torch.equal(got[0], y.to(BF16))
    assert torch.equal(got[1], mean)
    assert torch.equal(got[2], deviation)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norm_with_one_dtype_is_unchanged(dtype: torch.dtype) -> None:
    module = traced(layer, torch.randn(4, 8).to(dtype), *parameters(dtype))
    before = str(module.graph)
    assert str(widened(module).graph) == before


def test_bodies_within_are_looked_at() -> None:
    x, affine = torch.randn(4, 8).to(BF16), parameters(torch.float32)
    graph = torch.fx.Graph()
    operands = [graph.placeholder(name) for name in "abc"]
    graph.output(graph.call_module("body", tuple(operands)))
    outer = widened(torch.fx.GraphModule({"body": traced(layer, x, *affine)}, graph))
    assert torch.equal(outer(x, *affine), layer(x.float(), *affine).to(BF16))
