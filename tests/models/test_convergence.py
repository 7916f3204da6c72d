"""Convergence in narrow formats on a real task, and gradient scaling."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models.small_models import (
    Convolutional,
    Perceptron,
    build,
    compiled,
    relative_error,
)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """Return images and labels of the 1,797 handwritten digits of scikit-learn, [1797, 1, 8, 8] in
    [-1, 1], in a fixed random order.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order]
    return x / 8 - 1, torch.tensor(labels)[order]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "int8", "int8_grad"])
def test_learns_to_read_digits(precision: str) -> None:
    """Test accuracy is above 97% after six epochs."""
    x, y = _digits()
    model = build(Convolutional)
    fast = compiled(model, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=6 * 23)
    train, test = slice(0, 1472), slice(1472, None)
    for _ in range(6):
        for start in range(0, 1472, 64):
            optimizer.zero_grad()
            F.cross_entropy(
                fast(x[train][start : start + 64]), y[train][start : start + 64]
            ).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (fast(x[test]).argmax(1) == y[test]).float().mean().item()
    assert accuracy > 0.97


class TestGradScaler:
    def _step(self, model: nn.Module, fast: Any, x: Tensor, scale: float) -> tuple[bool, float]:
        """Run one step; return whether it changed the parameters, and the new scale."""
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        scaler.scale(fast(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        updated = any(
            not torch.equal(before[name], value) for name, value in model.state_dict().items()
        )
        return updated, scaler.get_scale()

    @pytest.mark.parametrize(
        "options",
        [
            {"precision": "fp16", "emulate_unsupported": True},
            {"precision": "int8"},
            {"precision": "fp8"},
        ],
    )
    def test_training_steps_with_unscaled_gradients(self, options: dict[str, Any]) -> None:
        model, plain, x = build(Perceptron), build(Perceptron), torch.randn(16, 16)
        assert self._step(model, compiled(model, **options), x, 1024.0) == (True, 1024.0)
        self._step(plain, plain, x, 1.0)
        start = build(Perceptron).state_dict()
        moved = {name: value - start[name] for name, value in model.state_dict().items()}
        wanted = {name: value - start[name] for name, value in plain.state_dict().items()}
        assert relative_error(moved, wanted) < 0.3

    def test_skips_a_step_whose_fp16_gradients_overflow(self) -> None:
        model = build(Perceptron)
        fast = compiled(model, precision="fp16", emulate_unsupported=True)
        # 65504 is the largest FP16 value: gradients of a loss scaled by 2**40 overflow.
        assert self._step(model, fast, torch.randn(16, 16), 2.0**40) == (False, 2.0**39)

    @pytest.mark.parametrize("precision", ["int8", "fp8"])
    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
    def test_skips_a_step_with_an_input_that_is_not_finite(
        self, precision: str, bad: float
    ) -> None:
        model, x = build(Perceptron), torch.randn(16, 16)
        x[3, 5] = bad
        fast = compiled(model, precision=precision)
        assert fast(x).isnan().any()
        assert self._step(model, fast, x, 1024.0) == (False, 512.0)
