"""Predicted memory of losses, compared with torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx.predictor.memory import LossMemory
from qsync_fx.profiler.observed_step import observed
from qsync_fx.profiler.timing.measured_memory import loss_in_step, loss_memory
from qsync_fx.profiler.timing.step_timers import TrainingStep, clock_for

ROWS, CLASSES = 64, 512
SIZE = 4 * ROWS * CLASSES
DIFFERENT = torch.zeros(ROWS, CLASSES)
LABELS = torch.zeros(ROWS, dtype=torch.long)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_reductions_of_differences_save_the_difference(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The torch kernels with a scalar result save it."""
    memory = loss_memory(lambda result: loss(result, DIFFERENT), torch.ones(ROWS, CLASSES))
    assert SIZE <= memory.held <= SIZE + 64
    assert 3 * SIZE <= memory.most <= 3 * SIZE + 64


def test_cross_entropy_memory_is_its_log_softmax() -> None:
    memory = loss_memory(lambda logits: F.cross_entropy(logits, LABELS), torch.ones(ROWS, CLASSES))
    assert memory.held <= 64
    assert memory.most >= 3 * SIZE


def test_results_stay_as_they_are() -> None:
    result = torch.ones(ROWS, CLASSES, requires_grad=True)
    loss_memory(lambda output: output.square().sum(), result)
    assert result.grad is None


def test_sum_saves_no_tensor_and_has_an_expanded_gradient() -> None:
    assert 0 <= loss_memory(torch.sum, torch.ones(ROWS, CLASSES)).held <= 64


class Named(nn.Module):
    """A model that returns its result by name, with values that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"result": self.linear(x), "best": self.linear(x).argmax(-1), "count": 3}


BATCH = torch.ones(ROWS, 8)


def found(step: Callable[[Any, Any], Tensor]) -> LossMemory | None:
    model = Named()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    observation = observed(
        model, TrainingStep(step, BATCH, None, model.zero_grad, clock_for(1)), {}
    )
    assert "forward" not in vars(model) and all(
        torch.equal(state[name], v) for name, v in model.state_dict().items()
    )
    return observation.loss


def test_loss_is_computed_from_the_model_output() -> None:
    memory = found(lambda model, x: F.mse_loss(model(x)["result"], DIFFERENT))
    assert memory is not None
    assert SIZE <= memory.held <= SIZE + 64 and 3 * SIZE <= memory.most <= 4 * SIZE


def test_step_may_read_the_model() -> None:
    memory = found(
        lambda model, x: (
            F.cross_entropy(model(x)["result"], LABELS) + model.linear.weight.square().sum()
        )
    )
    assert memory is not None and memory.held <= 64 and memory.most >= 3 * SIZE


def test_loss_memory_of_several_calls_is_unknown() -> None:
    assert found(lambda model, x: F.mse_loss(model(x)["result"], model(x)["result"] + 1)) is None


def test_loss_reading_other_values_is_unknown_and_restores_the_model() -> None:
    def step(model: Any, x: Tensor) -> Tensor:
        result = model(x)["result"]
        if result.grad_fn.name() == "CloneBackward0":
            raise RuntimeError("it asks where results come from")
        return F.mse_loss(result, DIFFERENT)

    assert found(step) is None


def test_loss_memory_without_gradients_is_unknown() -> None:
    returned = torch.ones(2, device="meta", requires_grad=True), torch.ones(2)
    for result in returned:
        assert loss_in_step(lambda model, batch: model(batch).sum(), Named(), BATCH, result) is None
