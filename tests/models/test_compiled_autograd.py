"""Compiled autograd: hooks on gradients stay in the compiled graph, and the backward pass is a
graph that Dynamo compiles too.

The plan has had its say when the forward pass was compiled; the backward pass that is recorded is
left as it is.
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
    """Puts a hook on a value between two layers that both have read before."""

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
    """Runs two steps without an update; `backward` compiles the backward pass."""
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
        found = train(model, compiled(model, **options), backward)
        assert relative_error(found, expected) <= bound, (precision, inner_backend)


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=tiers.ALL)])
def test_the_backward_pass_is_that_of_the_plan(inner_backend: str) -> None:
    """Recorded or not: to the bit, with a plan that names operators, which none of the backward
    graph's are.
    """
    plan = (
        qsync_fx.Plan.uniform("bf16")
        .with_precision("head", "int8")
        .with_precision("layers.0", "fp32")
    )
    found = []
    for recorded in (False, True):
        torch._dynamo.reset()
        model = build(Perceptron)
        options = {"plan": plan, "inner_backend": inner_backend, "rounding": "nearest"}
        backward = torch.compile(backend="qsync", options=options) if recorded else None
        found.append(train(model, compiled(model, **options), backward))
    if inner_backend == "aot_eager":
        assert_equal(found[1], found[0])
    else:
        # Fusion over both passes sums in another order.
        assert relative_error(found[1], found[0]) < 1e-5


def test_backward_in_an_autocast_region_preserves_formats() -> None:
    found = []
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
        found.append(gradients(model))
    assert_equal(found[1], found[0])
