"""Single-pass optimizers compared with torch's: parameters and state, for any values, instruction
set and number of threads.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx import _C
from tests.support.computing.compared_optimizers import (
    PAIRS,
    assert_alike,
    every_setting,
    parameters,
    steps,
)

pytest_plugins = ["tests.support.computing.compared_optimizers"]


@every_setting
@settings(max_examples=10)
@given(data=st.data())
def test_many_steps_equal_torch(
    name: str, hyperparameters: dict[str, Any], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
    count = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    exponent = data.draw(st.sampled_from([-140, -60, -10, 0, 10]))

    def drawn() -> list[Tensor]:
        return [torch.randn(size, generator=generator) * 2.0**exponent for size in sizes]

    start, gradients = drawn(), [drawn() for _ in range(count)]
    ours, torchs = PAIRS[name]
    actual = ours(parameters(*start), **hyperparameters)
    expected = torchs(parameters(*start), **hyperparameters, foreach=False)
    steps(actual, gradients)
    steps(expected, gradients)
    assert_alike(actual, expected, count)


@every_setting
def test_nonfinite_values_spread_as_in_torch(name: str, hyperparameters: dict[str, Any]) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3e38, 1.0])
    start = special.repeat_interleave(8)
    gradient = special.repeat(8)
    ours, torchs = PAIRS[name]
    actual, expected = (
        ours(parameters(start), **hyperparameters),
        torchs(parameters(start), **hyperparameters, foreach=False),
    )
    for optimizer in (actual, expected):
        steps(optimizer, [[gradient], [gradient.flip(0)], [gradient.roll(3)]])
    a, b = actual.param_groups[0]["params"][0], expected.param_groups[0]["params"][0]
    for mine, other in [
        (a, b),
        *((actual.state[a][key], expected.state[b][key]) for key in actual.state[a]),
    ]:
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine.isnan(), other.isnan())
            torch.testing.assert_close(mine.isinf(), other.isinf())
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, equal_nan=True)


@every_setting
def test_paths_and_threads_change_no_bit(
    name: str, hyperparameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    torch.manual_seed(1)
    start = [torch.randn(size) for size in (30_001, 7, 0, 64, 8191)]
    gradients = [[torch.randn_like(value) for value in start] for _ in range(3)]
    kernels = {"sgd": _C.sgd, "adam": _C.adam}
    results = []
    for isa in _C.available_isas():
        for threads in (1, 2, 5):
            for kernel, run in kernels.items():

                def forced(
                    *args: Any,
                    run: Any = run,
                    isa: str = isa,
                    threads: int = threads,
                    **kwargs: Any,
                ) -> None:
                    run(*args, **{**kwargs, "isa": isa, "threads": threads})

                monkeypatch.setattr(_C, kernel, forced)
            optimizer = PAIRS[name][0](parameters(*start), **hyperparameters)
            steps(optimizer, gradients)
            results.append([*optimizer.param_groups[0]["params"], *states_of(optimizer)])
    assert counted == [5] * 3 * len(results)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def states_of(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


@every_setting
@pytest.mark.parametrize("first", ["ours", "torch"])
def test_state_dicts_are_interchangeable(
    name: str, hyperparameters: dict[str, Any], first: str
) -> None:
    torch.manual_seed(2)
    start = [torch.randn(33), torch.randn(4, 5)]
    gradients = [[torch.randn_like(value) for value in start] for _ in range(4)]
    source_class, target_class = PAIRS[name] if first == "ours" else PAIRS[name][::-1]
    before = source_class(parameters(*start), **hyperparameters)
    steps(before, gradients[:2])
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = target_class(parameters(*before.param_groups[0]["params"]), lr=1.0)
    after.load_state_dict(torch.load(file))
    for optimizer in (before, after):
        steps(optimizer, gradients[2:])
    assert_alike(before, after, 2)
    pickled = pickle.loads(pickle.dumps(after))
    assert type(pickled) is target_class
    steps(pickled, gradients[:1])


def test_parameters_that_share_memory_step_in_turn() -> None:
    memory = torch.randn(40_000)
    ends = []
    for kind in PAIRS["SGD"]:
        buffer = memory.clone()
        both = [nn.Parameter(buffer[:30_000]), nn.Parameter(buffer[10_000:])]
        optimizer = kind(both, lr=0.1, momentum=0.9, weight_decay=0.5)
        threads = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            for _ in range(3):
                for parameter in both:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        finally:
            torch.set_num_threads(threads)
        ends.append(buffer)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


def test_wrong_addresses_and_counts_raise() -> None:
    value = torch.zeros(4)
    address = value.data_ptr()
    with pytest.raises(ValueError, match="null pointer"):
        _C.sgd([address], [0], [], [], [4], lr=0.1)
    with pytest.raises(ValueError, match="grads has 0 entries, not 1"):
        _C.sgd([address], [], [], [], [4], lr=0.1)
    with pytest.raises(ValueError, match="roots has 0 entries, not 1"):
        _C.adam(
            [address],
            [address],
            [address],
            [address],
            [],
            [address],
            [4],
            [0.1],
            [],
            beta1=0.9,
            beta2=0.9,
            eps=1e-8,
        )
    with pytest.raises(ValueError, match="threads is 0"):
        _C.sgd([address], [address], [], [], [4], lr=0.1, threads=0)
