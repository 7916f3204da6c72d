"""Number of steps of a sensitivity run, determined by the convergence of its mean.

Invariant: constant values need the minimum number of steps; varying values are sampled until their
mean converges or the maximum number of steps is reached.
"""

import statistics
from random import Random

import torch
from hypothesis import given, strategies as some
from torch import nn
from torch.nn.functional import mse_loss

from qsync_fx.profiler.sensitivity.estimate import LEAST, settled, several

WITHIN = 0.05


def trace_of(steps: int, spread: float, seed: int = 0) -> list[dict[tuple[str, str], float]]:
    drawn = Random(seed)
    return [{("a", "bf16"): drawn.gauss(1.0, spread), ("b", "bf16"): 3.0} for _ in range(steps)]


def test_constant_values_converge_after_the_minimum_steps() -> None:
    assert not settled(trace_of(LEAST - 1, 0.0), WITHIN)
    assert settled(trace_of(LEAST, 0.0), WITHIN)


@given(some.floats(0.4, 0.8), some.integers(0, 2**32))
def test_varying_values_are_sampled_until_convergence(spread: float, seed: int) -> None:
    steps = trace_of(2_000, spread, seed)
    ends = next(count for count in range(LEAST, len(steps)) if settled(steps[:count], WITHIN))
    a, both = (
        statistics.fmean(step["a", "bf16"] + more for step in steps[:ends]) for more in (0.0, 3.0)
    )
    left = [step["a", "bf16"] * (1 - a / both) - 3.0 * a / both for step in steps[:ends]]
    assert statistics.stdev(left) <= WITHIN * a * ends**0.5 * (1 + 1e-9)
    assert settled(steps, WITHIN)


@given(some.floats(0.02, 0.1), some.integers(0, 2**32))
def test_common_noise_does_not_delay_convergence(spread: float, seed: int) -> None:
    drawn = Random(seed)
    factors = [drawn.gauss(1.0, spread) for _ in range(LEAST)]
    common = [{("a", "bf16"): factor, ("b", "bf16"): 3.0 * factor} for factor in factors]
    converged = statistics.stdev(factors) / LEAST**0.5 <= 2 * WITHIN * statistics.fmean(factors)
    assert settled(common, WITHIN) == converged


def test_negligible_operators_do_not_delay_convergence() -> None:
    little = [
        {**step, ("c", "bf16"): 1e-3 * (index % 2)}
        for index, step in enumerate(trace_of(LEAST, 0.0))
    ]
    assert settled(little, WITHIN)
    assert not settled(
        [{key: 100 * value for key, value in step.items() if key[0] == "c"} for step in little],
        WITHIN,
    )


def test_operator_of_a_later_step_delays_convergence() -> None:
    late = [*trace_of(LEAST, 0.0)[1:], {**trace_of(1, 0.0)[0], ("late", "bf16"): 4.0}]
    assert not settled(late, WITHIN)


def test_single_batch_is_repeated_only_while_informative() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    batches = [(torch.randn(32, 16), torch.randn(32, 4))]

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return mse_loss(model(batch[0]), batch[1])

    (result,) = several(model, step, batches, ["second_order"], ["bf16"], steps=50, within=0.2)
    assert LEAST <= result.steps < 50 and len(result.trace) == result.steps
    (all_of_them,) = several(
        model, step, batches, ["second_order"], ["bf16"], steps=result.steps + 1
    )
    assert all_of_them.steps == result.steps + 1 and list(all_of_them.trace[:-1]) == list(
        result.trace
    )
