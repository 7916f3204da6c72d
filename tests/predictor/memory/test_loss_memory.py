"""Memory of a loss in a training step, and lifetimes of the first gradients of a backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from benchmarks.support.unbuilt import without_kernels
from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import (
    Category,
    LossMemory,
    Orders,
    TrainingMemory,
    step_memory,
)
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import loss_memory, measured_peak
from tests.support.planning.peaks import most_bytes
from tests.support.planning.predicted_models import graph_of, live_buffers

torch.set_num_threads(1)
ROWS, WIDE = 2048, 512


def narrow_to_wide() -> nn.Module:
    """Return a model whose output is its largest tensor."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDE))


def graph_of_wide() -> ModelGraph:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return build_model_graph(
        qsync_fx.explain(narrow_to_wide(), torch.randn(ROWS, 64)), ("fp32", "bf16")
    )


def test_loss_memory_is_live_during_the_backward_pass() -> None:
    planned = states(graph_of("mlp"), Plan("fp32"))
    without = step_memory(planned, TrainingMemory(loss=LossMemory())).moments
    moments = step_memory(planned, TrainingMemory(loss=LossMemory(held=1000, most=50_000))).moments
    more = [moment.bytes - before.bytes for moment, before in zip(moments, without, strict=True)]
    by_place = {
        place: {more[i] for i, moment in enumerate(moments) if moment.place == place}
        for place in ("forward", "optimizer")
    }
    assert by_place == {"forward": {0}, "optimizer": {0}}
    begun, *behind = [
        size for size, moment in zip(more, moments, strict=True) if moment.place == "backward"
    ]
    result = 4 * 4 * 4
    assert begun == 50_000 - result and set(behind) == {1000}
    assert moments[-2].of(Category.LOSS) == 1000


def test_first_gradient_is_released_after_its_last_reader() -> None:
    """Autograd has no reference to the gradient; in BF16, only its conversion reads it."""
    live = with_the_gradient(TrainingMemory(loss=LossMemory()))
    assert live[0] and not live[-1]


def with_the_gradient(training: TrainingMemory | None) -> list[bool]:
    live = [
        buffers
        for buffers in live_buffers(states(graph_of_wide(), Plan("bf16")), training)
        if buffers.backward
    ]
    return [4 * ROWS * WIDE in buffers.bytes.values() for buffers in live]


@pytest.mark.parametrize("training", [None, TrainingMemory()])
def test_unknown_loss_is_bounded_by_its_gradient(
    training: TrainingMemory | None,
) -> None:
    assert all(with_the_gradient(training))


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "odd", "vgg"])
def test_unknown_loss_needs_at_least_the_memory_of_a_trivial_loss(name: str, fmt: str) -> None:
    planned = states(graph_of(name), Plan(fmt))
    unknown, trivial = Orders.of(planned), Orders.of(planned, TrainingMemory(loss=LossMemory()))
    pairs = ((unknown.expected, trivial.expected), (unknown.written, trivial.written))
    for unknown_tasks, trivial_tasks in pairs:
        assert (
            step_memory(planned, None, unknown_tasks).peak.bytes
            >= step_memory(planned, None, trivial_tasks).peak.bytes
        )
    assert most_bytes(planned) >= most_bytes(planned, TrainingMemory(loss=LossMemory()))


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.cross_entropy])
def test_step_with_loss_peak_equals_the_prediction(fmt: str, loss: object) -> None:
    graph, model, x = graph_of_wide(), narrow_to_wide(), torch.randn(ROWS, 64)
    target = (
        torch.randn(ROWS, WIDE)
        if loss is nn.functional.mse_loss
        else torch.zeros(ROWS, dtype=torch.long)
    )

    def of(result: Tensor) -> Tensor:
        return loss(result, target)  # type: ignore[operator, no-any-return]

    with without_kernels():
        compiled = torch.compile(model, backend="qsync", options={"plan": Plan(fmt)})  # type: ignore[dict-item]

        def step() -> None:
            of(compiled(x)).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)

        step()
        real = measured_peak(step)
    training = TrainingMemory(loss=loss_memory(of, torch.zeros(ROWS, WIDE)))
    assert step_memory(states(graph, Plan(fmt)), training).step_bytes == pytest.approx(
        real, rel=0.03
    )
