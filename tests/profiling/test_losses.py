"""What a loss is said to keep and take is what torch's allocator counts of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qsync_fx.profiling.measuring.losses import loss_memory

ROWS, CLASSES = 64, 512
SIZE = 4 * ROWS * CLASSES
DIFFERENT = torch.zeros(ROWS, CLASSES)
LABELS = torch.zeros(ROWS, dtype=torch.long)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_what_is_reduced_over_differences_keeps_their_storage(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """So torch's kernels do, of which the result is a number."""
    found = loss_memory(lambda result: loss(result, DIFFERENT), torch.ones(ROWS, CLASSES))
    assert SIZE <= found.held <= SIZE + 64
    assert 3 * SIZE <= found.most <= 3 * SIZE + 64


def test_cross_entropy_keeps_nothing_and_takes_the_logarithms() -> None:
    found = loss_memory(lambda logits: F.cross_entropy(logits, LABELS), torch.ones(ROWS, CLASSES))
    assert found.held <= 64
    assert found.most >= 3 * SIZE


def test_results_stay_as_they_are() -> None:
    result = torch.ones(ROWS, CLASSES, requires_grad=True)
    loss_memory(lambda found: found.square().sum(), result)
    assert result.grad is None
