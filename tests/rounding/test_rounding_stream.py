"""Random stream of roundings: it does not change torch's generators, and follows torch's seed.

test_rounding_states.py tests its state, test_rounding_ranks.py ranks and restarts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import (
    Tensor,
    manual_seed,
    nn,
)  # manual_seed by name, before qsync_fx wraps it

import qsync_fx
from qsync_fx.rounding import number
from tests.support import tiers
from tests.support.computing.rounding_steps import differ, started, step
from tests.support.models.small_models import Perceptron, assert_equal, build, compiled

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


# Torch's generator.


@pytest.mark.parametrize(
    ("precision", "inner_backend"),
    [
        ("tf32", "aot_eager"),
        ("fp8", "aot_eager"),
        ("int8_grad", "aot_eager"),
        ("int8", "aot_eager"),
        ("int8", "eager"),
        pytest.param("int8", "inductor", marks=tiers.ALL),
    ],
)
def test_torch_s_generator_is_where_fp32_leaves_it(precision: str, inner_backend: str) -> None:
    def after(precision: str) -> tuple[Tensor, Tensor]:
        torch.compiler.reset()
        model = build(lambda: Perceptron(0.5))
        fast = compiled(model, precision=precision, inner_backend=inner_backend)
        for _ in range(3):
            step(fast, model)
        return torch.get_rng_state(), torch.randperm(100)

    for actual, expected in zip(after(precision), after("fp32"), strict=True):
        assert torch.equal(actual, expected)


def test_dropout_mask_equals_fp32() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.nn.functional.dropout(self.first(x), 0.5)
            return self.second(x), x == 0

    def dropped(precision: str) -> list[Tensor]:
        torch.compiler.reset()
        model = build(Dropped)
        fast = compiled(model, precision=precision)
        return [fast(torch.ones(8, 16))[1] for _ in range(3)]

    assert all(torch.equal(a, b) for a, b in zip(dropped("fp32"), dropped("int8"), strict=True))


# Seeds.


@pytest.mark.parametrize(
    "inner_backend", ["eager", "aot_eager", pytest.param("inductor", marks=tiers.ALL)]
)
def test_equal_seeds_give_equal_runs(
    inner_backend: str,
) -> None:
    step = started(inner_backend=inner_backend)
    runs = []
    for _ in range(2):
        manual_seed(3)
        runs.append([step() for _ in range(3)])
    for first, second in zip(*runs, strict=True):
        assert_equal(first, second)
    assert differ(runs[0][0], runs[0][1])


@pytest.mark.parametrize(
    "seeded",
    [
        lambda: torch.manual_seed(4),
        lambda: torch.random.manual_seed(4),
        lambda: torch.manual_seed(4).initial_seed(),
        lambda: torch.random.default_generator.manual_seed(4),
    ],
    ids=["torch", "torch.random", "its generator", "torch.random's generator"],
)
def test_every_seed_function_restarts_the_stream(seeded: Callable[[], Any]) -> None:
    step, results = started(), []
    for _ in range(2):
        seeded()
        results.append(step())
    assert_equal(*results)


def test_new_seed_of_torch_generator_is_detected() -> None:
    step = started()
    torch.default_generator.manual_seed(5)
    first = step()
    torch.default_generator.manual_seed(6)
    other = step()
    torch.default_generator.manual_seed(5)
    assert_equal(first, step())
    assert differ(first, other)


def test_torch_seed_starts_another_stream() -> None:
    step = started()
    manual_seed(3)
    first = step()
    torch.seed()
    assert differ(first, step())


def test_negative_and_large_seeds_equal_torch() -> None:
    step = started()
    for seed in (-1, 2**63, 2**64 - 1):
        manual_seed(seed)
        assert qsync_fx.rounding_stream.state_dict() == {"seed": torch.initial_seed(), "draws": 0}
        step()


def test_seeding_in_forward_repeats_the_rounding() -> None:
    class Seeding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(7)
            y = self.layer(x) + torch.initial_seed()
            with torch.random.fork_rng(devices=[]):
                y = y + torch.rand(16)
            torch.set_rng_state(torch.get_rng_state())
            return y + self.layer(x)

    model = build(Seeding)
    fast, x = compiled(model, precision="int8"), torch.randn(4, 16)
    assert torch.equal(fast(x), fast(x))


# Operations that draw random numbers.


def _draws() -> int:
    return qsync_fx.rounding_stream.state_dict()["draws"]


def test_evaluation_nearest_and_fp32_use_no_random_numbers() -> None:
    model = build(Perceptron)
    x = torch.randn(4, 16)
    before = _draws()
    for options in (
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "int8", "rounding": "nearest"},
    ):
        compiled(model, **options)(x).sum().backward()
    with torch.no_grad():
        compiled(model, precision="int8")(x)
    qsync_fx.explain(model, x, options={"precision": "int8"})
    assert _draws() == before


def test_recompilation_does_not_restart_the_stream() -> None:
    model = build(Perceptron)
    fast = compiled(model, precision="int8")
    manual_seed(3)
    for batch in (4, 4, 7, 9):
        fast(torch.ones(batch, 16)).sum().backward()
    assert _draws() == 4
    torch.compiler.reset()
    fast(torch.ones(4, 16)).sum().backward()
    assert _draws() == 5


def test_every_graph_of_a_step_has_distinct_random_numbers() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = self.layer(x)
            torch._dynamo.graph_break()
            return first, self.layer(x)

    model = build(Broken)
    fast = compiled(model, precision="int8")
    manual_seed(3)
    first, second = fast(torch.linspace(-1, 1, 64).reshape(4, 16))
    assert _draws() == 2
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("inner_backend", "budget"),
    [("aot_eager", 0.1), ("aot_eager", 0.5), pytest.param("inductor", 0.5, marks=tiers.ALL)],
)
def test_memory_budget_recomputation_repeats_the_rounding(
    inner_backend: str, budget: float
) -> None:
    step = started(inner_backend=inner_backend)
    manual_seed(3)
    expected = step()
    torch.compiler.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        manual_seed(3)
        assert_equal(expected, step())
    assert _draws() == 1


def test_numbers_of_seeds_ranks_and_places_do_not_meet() -> None:
    numbers = [number(*place) for place in itertools.product(range(25), range(4), range(25))]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= value < 2**62 for value in numbers)
    # Every bit is set in half of the numbers, within five standard deviations.
    for bit in range(62):
        ones = sum(value >> bit & 1 for value in numbers)
        assert abs(ones - len(numbers) / 2) < 5 * (len(numbers) / 4) ** 0.5
