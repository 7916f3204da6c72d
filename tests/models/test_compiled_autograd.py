"""Compiled autograd: gradient hooks stay in the compiled graph, and Dynamo compiles the backward
pass.

The plan applies when the forward pass is compiled. The backend leaves the recorded backward graph
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from tests.support import tiers
from tests.support.models.small_models import (
    Perceptron,
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

Prepare = Callable[[nn.Module], Any]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def doubled(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    assert all(g.dtype is torch.float32 for g in (*inputs, *outputs))
    return tuple(2 * g for g in inputs)


def halved(module: nn.Module, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    assert all(g.dtype is torch.float32 for g in outputs)
    return tuple(g / 2 for g in outputs)


def clamped(gradient: Tensor) -> Tensor:
    assert gradient.dtype is torch.float32
    return gradient.clamp(-0.01, 0.01)


class Hooking(Perceptron):
    """Perceptron with a gradient hook on the input of its head, after the head has read it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        z = self.head(y)
        y.register_hook(clamped)
        return z + y[:, :10]


def no_hook(model: nn.Module) -> None:
    pass


def full_hooks(model: nn.Module) -> None:
    for module in (model, model.get_submodule("layers.0"), model.get_submodule("head")):
        module.register_full_backward_hook(doubled)


def pre_hooks(model: nn.Module) -> None:
    for module in (
        model.get_submodule("layers"),
        model.get_submodule("layers.3"),
        model.get_submodule("head"),
    ):
        module.register_full_backward_pre_hook(halved)


def train(model: nn.Module, call: Any, backward: Any = None) -> dict[str, Tensor]:
    """Run two steps without an update; `backward` compiles the backward pass."""
    torch.manual_seed(1)
    x = torch.randn(16, 16, requires_grad=True)
    for _ in range(2):
        with (
            torch._dynamo.compiled_autograd._enable(backward, dynamic=False)
            if backward
            else torch.enable_grad()
        ):
            call(x).square().mean().backward()
    assert x.grad is not None
    return gradients(model) | {"x": x.grad}


@tiers.one_in(2)
@tiers.ALL
@pytest.mark.parametrize(
    ("make", "prepare"),
    [(Perceptron, no_hook), (Perceptron, full_hooks), (Perceptron, pre_hooks), (Hooking, no_hook)],
    ids=["plain", "full", "pre", "value"],
)
def test_hooks_under_compiled_autograd_equal_torch(
    make: Callable[[], nn.Module], prepare: Prepare
) -> None:
    plain = build(make)
    prepare(plain)
    expected = train(plain, plain)
    for precision, inner_backend, bound in (
        ("fp32", "aot_eager", 1e-6),
        ("bf16", "eager", 0.03),
        ("int8", "aot_eager", 0.15),
    ):
        torch._dynamo.reset()
        model = build(make)
        prepare(model)
        options = {"precision": precision, "inner_backend": inner_backend}
        backward = torch.compile(backend="qsync", options=options)
        actual = train(model, compiled(model, **options), backward)
        assert relative_error(actual, expected) <= bound, (precision, inner_backend)


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=tiers.ALL)])
def test_the_backward_pass_is_that_of_the_plan(inner_backend: str) -> None:
    """With aot_eager, gradients are bit-identical with and without compiled autograd. The plan
    names operators, which are not in the backward graph.
    """
    plan = (
        qsync_fx.Plan.uniform("bf16")
        .with_precision("head", "int8")
        .with_precision("layers.0", "fp32")
    )
    results = []
    for recorded in (False, True):
        torch._dynamo.reset()
        model = build(Perceptron)
        options = {"plan": plan, "inner_backend": inner_backend, "rounding": "nearest"}
        backward = torch.compile(backend="qsync", options=options) if recorded else None
        results.append(train(model, compiled(model, **options), backward))
    if inner_backend == "aot_eager":
        assert_equal(results[1], results[0])
    else:
        # Inductor fuses across both passes, which changes the order of summation.
        assert relative_error(results[1], results[0]) < 1e-5


def test_backward_in_an_autocast_region_preserves_formats() -> None:
    results = []
    for region in (False, True):
        torch._dynamo.reset()
        model = build(Perceptron)
        options = {"precision": "fp32", "inner_backend": "aot_eager"}
        call, x = compiled(model, **options), torch.ones(4, 16)
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(backend="qsync", options=options)
        ):
            loss = call(x).square().mean()
            with torch.autocast("cpu", torch.bfloat16, enabled=region):
                loss.backward()
        results.append(gradients(model))
    assert_equal(results[1], results[0])
