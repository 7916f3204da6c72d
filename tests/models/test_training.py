"""Training features: optimizers, clipping, seeds, accumulation, evaluation, checkpoints.

In FP32 a compiled model trains bit-identically to torch's "aot_eager"; in narrow formats within the
error of the format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import tiers
from tests.support.computing.digit_training import ERRORS, PRECISIONS, batch
from tests.support.models.small_models import (
    Convolutional,
    Perceptron,
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

torch.set_num_threads(1)


def _steps(model: Any, optimizer: torch.optim.Optimizer, n: int = 3) -> list[float]:
    losses = []
    for step in range(n):
        x, y = batch(seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_within_the_error_of_the_format(precision: str) -> None:
    x, y = batch(64)
    model, plain = build(Convolutional), build(Convolutional)
    F.cross_entropy(compiled(model, precision=precision)(x), y).backward()
    F.cross_entropy(torch.compile(plain, backend="aot_eager")(x), y).backward()
    # Batch norm subtracts the mean, so the gradient of the bias before it is only rounding error.
    model.conv.bias.grad = plain.conv.bias.grad = None
    error = relative_error(gradients(model), gradients(plain))
    assert error <= ERRORS[precision]
    assert (error > 0) is (precision != "fp32")
    assert all(g.dtype is torch.float32 for g in gradients(model).values())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    ],
    ids=["sgd", "sgd-foreach", "sgd-fused", "adamw-foreach", "adamw-fused"],
)
def test_fp32_trains_as_torch_does_with_every_optimizer(
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model, plain = build(Convolutional), build(Convolutional)
    ours = _steps(compiled(model, precision="fp32"), optimizer(model.parameters()))
    theirs = _steps(torch.compile(plain, backend="aot_eager"), optimizer(plain.parameters()))
    assert ours == theirs
    assert_equal(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("precision", "inner_backend"),
    [
        ("int8", "aot_eager"),
        ("fp8", "aot_eager"),
        pytest.param("int8", "inductor", marks=tiers.ALL),
    ],
)
def test_manual_seed_reproduces_a_run_to_the_last_bit(precision: str, inner_backend: str) -> None:
    def run(seed: int) -> tuple[list[float], dict[str, Tensor]]:
        model = build(Convolutional)
        fast = compiled(model, precision=precision, inner_backend=inner_backend)
        torch.manual_seed(seed)
        return _steps(fast, torch.optim.SGD(model.parameters(), lr=0.1)), model.state_dict()

    losses, weights = run(1)
    again, weights_again = run(1)
    others, _ = run(2)
    assert losses == again
    assert_equal(weights, weights_again)
    assert losses != others, "stochastic rounding depends on the seed"


def test_every_step_has_new_roundings() -> None:
    model = build(Perceptron)
    fast, x = compiled(model, precision="int8"), torch.randn(16, 16)
    assert not torch.equal(fast(x), fast(x))


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_repeatable_and_near_fp32(precision: str, mode: Callable[[], Any]) -> None:
    model = build(lambda: Perceptron(0.5)).eval()
    fast, x = compiled(model, precision=precision), torch.randn(16, 16)
    with mode():
        output = fast(x)
        assert torch.equal(output, fast(x))
        assert (output - model(x)).abs().max() < 0.1
    assert not output.requires_grad
    model.train()
    assert not torch.equal(fast(x), fast(x)), "dropout is active in training mode"


def test_evaluation_leaves_the_generator_alone() -> None:
    model = build(Perceptron).eval()
    fast, x = compiled(model, precision="int8"), torch.randn(4, 16)
    state = torch.get_rng_state()
    with torch.no_grad():
        fast(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_accumulate() -> None:
    model = build(Perceptron)
    fast, x = compiled(model, precision="int8"), torch.randn(16, 16)
    torch.manual_seed(5)
    fast(x).sum().backward()
    fast(2 * x).sum().backward()
    together = gradients(model)
    torch.manual_seed(5)
    parts = []
    for scale in (1, 2):
        model.zero_grad()
        fast(scale * x).sum().backward()
        parts.append(gradients(model))
    assert_equal(together, {name: parts[0][name] + parts[1][name] for name in together})


def test_two_forwards_before_two_backwards() -> None:
    """The second forward pass does not overwrite the saved tensors of the first."""
    model = build(Perceptron)
    fast, x = compiled(model, precision="int8", rounding="nearest"), torch.randn(16, 16)
    fast(x).sum().backward()
    fast(-x).sum().backward()
    one_by_one = gradients(model)
    model.zero_grad()
    first, second = fast(x).sum(), fast(-x).sum()
    first.backward()
    second.backward()
    assert_equal(gradients(model), one_by_one)


def test_state_dict_round_trip() -> None:
    """A checkpoint of a compiled model has the keys of the model and FP32 values, and training
    resumed from it is bit-identical.
    """
    model = build(Convolutional)
    plain_keys = list(model.state_dict())
    fast = compiled(model, precision="int8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _steps(fast, optimizer, 2)
    assert list(model.state_dict()) == plain_keys
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32, torch.int64}
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    _steps(fast, optimizer, 2)

    other = build(Convolutional, seed=9)
    fast = compiled(other, precision="int8")
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    _steps(fast, optimizer, 1)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    _steps(fast, optimizer, 2)
    assert_equal(other.state_dict(), model.state_dict())


def test_a_compiled_training_step_with_the_loss_inside() -> None:
    model, plain = build(Convolutional), build(Convolutional)
    x, y = batch()

    def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(x), y)

    compiled(loss, precision="fp32")(model, x, y).backward()
    torch.compile(loss, backend="aot_eager")(plain, x, y).backward()
    assert_equal(gradients(model), gradients(plain))
