"""Measured peak memory of steps with known allocations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.profiler.timing.measured_memory import measured_peak, memory_events

KIB = 256  # elements of FP32


def test_peak_counts_simultaneous_bytes() -> None:
    def step() -> None:
        first = torch.empty(3 * KIB)
        del first
        live = [torch.empty(2 * KIB)]
        live.append(torch.empty(4 * KIB))
        live.pop(0)
        torch.empty(1 * KIB)

    assert memory_events(step) == [1024 * n for n in (3, -3, 2, 4, -2, 1, -1, -4)]
    assert measured_peak(step) == 6 * 1024


def test_step_without_allocations_has_no_peak() -> None:
    x = torch.ones(8)
    assert measured_peak(lambda: x.relu_()) == 0


def test_memory_of_the_previous_step_is_excluded() -> None:
    left: list[Tensor] = []

    def step() -> None:
        left[:] = []
        left.append(torch.empty(5 * KIB))
        torch.empty(1 * KIB)

    step()
    # The step first releases the 5 KiB that were live before, and exceeds them by at most 1 KiB.
    assert measured_peak(step) == 1024


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_step_counts_gradients_and_saved_tensors_only(
    momentum: float,
) -> None:
    layer = nn.Linear(64, 32, bias=False)
    x = torch.randn(16, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum)

    def step() -> None:
        layer(x).relu().backward(torch.ones(16, 32))
        optimizer.step()
        optimizer.zero_grad()

    weight, y = 64 * 32 * 4, 16 * 32 * 4
    # Live in the backward pass: the output of ReLU, its gradient, the product's gradient, and the
    # weight's gradient.
    assert measured_peak(step) == weight + 3 * y
