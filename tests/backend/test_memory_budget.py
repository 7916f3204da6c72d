"""The option "memory_budget": fewer saved bytes, and the gradients of a step without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from qsync_fx import ClusterPlan, Plan
from qsync_fx.errors import OptionError
from qsync_fx.options import Options
from tests.support import tiers

BUDGETS = (1.0, 0.5, 0.0)
PLAN = ClusterPlan(
    {"t4": Plan.uniform("fp32"), "a10": Plan.uniform("fp32")}, memory_budgets={"t4": 0.25}
)


class Residual(nn.Module):
    """Products, norms, dropout, and a convolution with batch norm, which updates its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.last, self.dropout = nn.LayerNorm(64), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.norm(self.stem(x))).flatten(2)
        hidden = self.dropout(torch.nn.functional.gelu(self.up(rows)))
        result: Tensor = self.last(rows + self.dropout(self.down(hidden)))
        return result


def step(model: nn.Module, x: Tensor, options: dict[str, Any]) -> tuple[int, Tensor]:
    """Return the bytes that a compiled forward pass leaves allocated, and the gradients of a step,
    flattened.
    """
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="qsync", options=options)
    torch.manual_seed(1)
    compiled(x).square().mean().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = compiled(x)
    events = profiler.profiler.kineto_results.events()
    saved = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return saved - result.nbytes, torch.cat(gradients)


def steps(options: dict[str, Any]) -> list[tuple[int, Tensor]]:
    results = []
    for budget in BUDGETS:
        torch.manual_seed(0)
        x = torch.randn(32, 3, 8, 8)
        results.append(step(Residual(), x, {**options, "memory_budget": budget}))
    return results


@pytest.mark.parametrize("precision", ["int8", pytest.param("bf16", marks=tiers.ALL), "fp32"])
def test_less_is_saved_with_bit_equal_gradients(precision: str) -> None:
    options = {"precision": precision, "rounding": "nearest", "inner_backend": "aot_eager"}
    results = steps(options)
    sizes = [size for size, _ in results]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.8 * sizes[0]
    for _, gradients in results[1:]:
        assert torch.equal(gradients, results[0][1])


@tiers.ALL
@pytest.mark.parametrize(
    ("precision", "error"),
    [("fp32", 1e-5), pytest.param("bf16", 0.02, marks=tiers.EVERY), ("int8", 0.05)],
)
def test_inductor_saves_less_with_equal_gradients(precision: str, error: float) -> None:
    """Inductor sums in another order, and omits roundings to 16 bits within a fused kernel."""
    results = steps({"precision": precision, "rounding": "nearest"})
    sizes = [size for size, _ in results]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.8 * sizes[0]
    expected = results[0][1]
    for _, gradients in results[1:]:
        assert (gradients - expected).norm() <= error * expected.norm()


class Counting(nn.Module):
    """An operator that reads a buffer before the step changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(64)), nn.Linear(64, 64)
        self.register_buffer("count", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        result = self.linear(torch.tanh(x * self.weight + self.count.view(1, 64)))
        self.count.add_(1.0)
        return result.sin()


class Dropouts(nn.Module):
    """Random operators with two results, and no product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.dropout(x * self.weight, 0.5))
        return nn.functional.dropout(hidden, 0.25)


@pytest.mark.parametrize("kind", [Counting, Dropouts])
def test_mutated_inputs_and_random_numbers_are_not_read_again(kind: type[nn.Module]) -> None:
    results = []
    for budget in BUDGETS:
        torch.manual_seed(0)
        options = {"precision": "fp32", "inner_backend": "aot_eager", "memory_budget": budget}
        results.append(step(kind(), torch.randn(4, 64), options)[1])
    assert all(torch.equal(results[0], gradients) for gradients in results[1:])


def test_a_process_wide_budget_of_torch_is_unchanged() -> None:
    from torch._functorch import config

    before = config.activation_memory_budget, config.is_non_builtin_to_include
    step(nn.Linear(4, 4), torch.randn(2, 4), {"inner_backend": "aot_eager", "memory_budget": 0.5})
    assert (config.activation_memory_budget, config.is_non_builtin_to_include) == before


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_a_budget_is_a_share(value: object) -> None:
    with pytest.raises(OptionError, match="memory_budget"):
        Options.parse({"memory_budget": value})


@pytest.mark.parametrize("other", [{"inner_backend": "eager"}, {"activation_recompute": True}])
def test_options_that_select_saved_tensors_themselves_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="cannot be combined"):
        Options.parse({"memory_budget": 0.5, **other})
    assert Options.parse({"memory_budget": 1, **other}).memory_budget == 1.0
    planned = {"plan": PLAN, "device_class": "t4", **other}
    with pytest.raises(OptionError, match="of the plan cannot be combined"):
        Options.parse(planned)
    assert Options.parse({"memory_budget": 1, **planned}).active_memory_budget == 1.0


def test_the_budget_of_a_plan_is_active_unless_the_option_is_set() -> None:
    part = Options.parse({"plan": PLAN, "device_class": "t4"})
    assert (part.memory_budget, part.active_memory_budget) == (None, 0.25)
    other = Options.parse({"plan": PLAN, "device_class": "a10"})
    assert other.active_memory_budget is None
    assert part != other and part.plan == other.plan, (
        "options with different memory budgets are not equal"
    )
    assert replace(other, plan=part.plan) == replace(part, device_class="a10")
    assert replace(part, memory_budget=0.75).active_memory_budget == 0.75
    assert Options().active_memory_budget is None
    assert part.non_default_options == ""
    sizes = []
    for name in ("a10", "t4"):
        torch.manual_seed(0)
        options = {"plan": PLAN, "device_class": name, "inner_backend": "aot_eager"}
        sizes.append(step(Residual(), torch.randn(8, 3, 8, 8), options)[0])
    assert sizes[1] < 0.9 * sizes[0]
