"""Convolutions whose kernel is longer than their data, in memory full of NaN, against FP64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import qsync_fx
from tests.support import tiers
from tests.support.computing.convolution_search import Problem, dirty_memory, draw, wrong

FORMATS = ("bf16", "int8", "int8_grad")
TOLERANCE = {"bf16": 0.03, "int8": 0.15, "int8_grad": 0.25, None: 0.03, "fp32": 1e-4}
INNER = ["aot_eager", pytest.param("inductor", marks=tiers.ALL)]


@pytest.fixture(autouse=True)
def _dirty() -> Iterator[None]:
    with dirty_memory():
        yield


class Block(nn.Module):
    """A block of torchvision's r3d_18 with its shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(channels, out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm3d(out)
        self.second = nn.Conv3d(out, out, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm3d(out)
        self.shortcut = nn.Conv3d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last_norm(self.second(self.norm(self.first(x)).relu()))
        return F.relu(y + self.shortcut(x))


def video_model() -> nn.Module:
    """Return the stem of r3d_18 and a block of each kind, narrow: the depth is 4, then 2."""
    stem = nn.Conv3d(3, 16, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)
    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1)
    return nn.Sequential(stem, nn.BatchNorm3d(16), nn.ReLU(), *blocks)


def gradients(step: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = step(x).float()
    loss = (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(4))).sum()
    return [g.float() for g in torch.autograd.grad(loss, [x, *model.parameters()])]


def check(
    model: nn.Module, x: Tensor, precision: str | None, inner_backend: str, **compiling: Any
) -> None:
    torch._dynamo.reset()
    expected = gradients(model.double(), model, x.double())
    model.float()
    options: dict[str, Any] = {"inner_backend": inner_backend}
    if precision is not None:
        options["precision"] = precision
    step = torch.compile(model, backend="qsync", options=options, **compiling)
    for _ in range(2):
        results = gradients(step, model, x)
    names = ["input", *(name for name, _ in model.named_parameters())]
    for name, result, right in zip(names, results, expected, strict=True):
        error = float((result - right).norm() / right.norm().clamp(min=1e-6))
        assert error <= TOLERANCE[precision], (name, error)


@tiers.one_in(3)
@pytest.mark.parametrize("inner_backend", INNER)
@pytest.mark.parametrize("precision", [*FORMATS, "fp32", None])
def test_video_block(precision: str | None, inner_backend: str) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv3d(16, 32, 3, padding=1), nn.Conv3d(32, 32, 3, padding=1))
    check(block, torch.randn(2, 16, 2, 8, 8), precision, inner_backend)


@pytest.mark.parametrize("inner_backend", INNER)
def test_video_model(inner_backend: str) -> None:
    torch.manual_seed(0)
    model, x = video_model(), torch.randn(2, 3, 4, 16, 16)
    torch._dynamo.reset()
    options = {"precision": "bf16", "inner_backend": inner_backend}
    results = gradients(torch.compile(model, backend="qsync", options=options), model, x)
    expected = gradients(model, model, x)
    for result, right in zip(results, expected, strict=True):
        assert (result - right).norm() <= 0.25 * right.norm()


LAYERS = {
    "grouped": (lambda: nn.Conv3d(16, 32, 3, padding=1, groups=2), (2, 16, 2, 5, 6)),
    "one channel a group": (lambda: nn.Conv3d(2, 10, 3, padding=1, groups=2), (2, 2, 1, 5, 4)),
    "dilated": (lambda: nn.Conv3d(16, 16, 3, padding=2, dilation=2), (2, 16, 4, 5, 6)),
    "strided": (lambda: nn.Conv3d(16, 16, 3, padding=1, stride=2), (2, 16, 2, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose3d(16, 8, 3, padding=1), (2, 16, 2, 8, 8)),
    "same": (lambda: nn.Conv3d(16, 16, 3, padding="same"), (2, 16, 2, 8, 8)),
    "no batch": (lambda: nn.Conv3d(16, 16, 3, padding=1), (16, 2, 8, 8)),
    "two dimensions": (lambda: nn.Conv2d(128, 32, (7, 3), padding=(3, 1)), (1, 128, 2, 4)),
    "one dimension": (lambda: nn.Conv1d(128, 32, 7, 3, 3), (1, 128, 2)),
}


@tiers.one_in(3)
@pytest.mark.parametrize("inner_backend", INNER)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, precision: str, inner_backend: str) -> None:
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    x = torch.randn(shape)
    if x.dim() == 5:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    check(make(), x, precision, inner_backend)


@pytest.mark.parametrize("inner_backend", INNER)
def test_depthwise_layer_in_fp32(inner_backend: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv3d(16, 16, (7, 4, 3), (2, 2, 3), (3, 0, 1), groups=16)
    x = torch.randn(3, 16, 7, 14, 4).contiguous(memory_format=torch.channels_last_3d)
    layer = layer.to(memory_format=torch.channels_last_3d)
    check(layer, x, "fp32", inner_backend)


@given(st.integers(0, 2**32 - 1))
def test_random_problems(seed: int) -> None:
    problem = draw(random.Random(seed))
    assert wrong(problem, torch.bfloat16, guarded=True) == []


def compiled(problem: Problem, precision: str, inner_backend: str) -> None:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if problem.transposed:
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    extra = {"output_padding": problem.output_padding} if problem.transposed else {}
    torch.manual_seed(problem.seed)
    layer = kinds[len(problem.size) - 1](
        problem.in_channels,
        problem.out_channels,
        problem.kernel,
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
        **extra,
    )
    check(layer, problem.tensors(torch.float32)[1], precision, inner_backend, dynamic=False)


@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMATS))
def test_random_layers(seed: int, precision: str) -> None:
    compiled(draw(random.Random(seed)), precision, "aot_eager")


@tiers.ALL
@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMATS))
def test_random_layers_with_inductor(seed: int, precision: str) -> None:
    compiled(draw(random.Random(seed)), precision, "inductor")


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x).float()


@pytest.mark.parametrize("inner_backend", INNER)
def test_region_of_autocast(inner_backend: str) -> None:
    torch.manual_seed(0)
    model, x = Region(), torch.randn(2, 16, 2, 8, 8)
    expected = gradients(model.layer, model, x)
    torch._dynamo.reset()
    results = gradients(
        torch.compile(model, backend="qsync", options={"inner_backend": inner_backend}), model, x
    )
    for result, right in zip(results, expected, strict=True):
        assert (result - right).norm() <= 0.03 * right.norm()


def test_symbolic_sizes() -> None:
    torch.manual_seed(0)
    model = nn.Conv3d(16, 16, 3, padding=1)
    options = {"precision": "bf16", "inner_backend": "aot_eager"}
    step = torch.compile(model, backend="qsync", dynamic=True, options=options)
    for depth in (4, 2, 3, 2):
        x = torch.randn(2, 16, depth, 8, 7)
        expected = gradients(model, model, x)
        for result, right in zip(gradients(step, model, x), expected, strict=True):
            assert (result - right).norm() <= 0.03 * right.norm()


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv3d(8, 8, 3, padding=1), torch.randn(2, 8, 2, 6, 6)

    def penalty(step: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        slope = torch.autograd.grad(step(leaf).float().square().sum(), leaf, create_graph=True)[0]
        return list(torch.autograd.grad(slope.square().sum(), [leaf, model.weight]))

    options = {"precision": "bf16", "inner_backend": "eager"}
    results = penalty(torch.compile(model, backend="qsync", options=options))
    for result, right in zip(results, penalty(model), strict=True):
        assert (result - right).norm() <= 0.03 * right.norm()


def test_gradients_per_sample() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv3d(8, 8, 3, padding=1), torch.randn(3, 8, 2, 6, 6)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        y = torch.func.functional_call(model, weights, (sample.unsqueeze(0),))
        return y.float().square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))
    options = {"precision": "bf16", "inner_backend": "aot_eager"}
    results = torch.compile(each, backend="qsync", options=options)(weights, x)
    for name, right in each(weights, x).items():
        assert (results[name] - right).norm() <= 0.03 * right.norm()


def test_graph_contains_the_padding() -> None:
    model = nn.Conv3d(4, 4, 3, padding=1)

    def text(depth: int) -> str:
        torch._dynamo.reset()
        x = torch.randn(1, 4, depth, 4, 4)
        return str(qsync_fx.explain(model, x, options={"precision": "bf16"}).graph("lower"))

    assert "padded_convolution" in text(2)
    assert "padded_convolution" not in text(3)
