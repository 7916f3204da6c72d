"""DUO's copies in host memory: bounded staging buffer, device memory, and training bit-identical to
copies on the device.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_fx.communication.duo.offload import SHARE, SLOTS, Offload
from tests.support import tiers
from tests.support.processes import ranks

CPU = torch.device("cpu")
run = functools.partial(ranks.results, script="duo_rank.py")
memory = functools.partial(ranks.results, "live_tensors", script="duo_memory_rank.py")


@pytest.mark.parametrize("size", [1, 63, 64, 640, 1000])
def test_bridge_is_bounded_and_copies_all_values(size: int) -> None:
    offload = Offload(CPU, 6400, active=True)
    values = torch.randn(size, dtype=torch.bfloat16)
    target = offload.empty_like(values, torch.float32)
    assert offload.offload(values, target) is None
    assert torch.equal(target, values.float())
    assert offload.bridge_nbytes == 4 * 6400 // SHARE
    assert 4 * offload._segment * SLOTS == offload.bridge_nbytes


def test_copies_on_the_device_have_no_bridge() -> None:
    offload = Offload(CPU, 6400, active=False)
    values = torch.randn(100)
    target = offload.empty_like(values)
    offload.offload(values, target)
    assert torch.equal(target, values)
    assert offload.bridge_nbytes == 0


@pytest.mark.parametrize("active", [False, True])
def test_state_is_recovered_in_the_same_tensors(active: bool) -> None:
    p = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([p], lr=0.1)
    offload = Offload(CPU, 15, active)
    for step in range(3):
        before = copy.deepcopy(dict(optimizer.state[p]))
        tensors = dict(optimizer.state[p])
        offload.save_state(optimizer.state)
        p.grad = torch.randn(5, 3)
        optimizer.step()
        if step == 2:
            del optimizer.state[p]["exp_avg"]
        offload.recover_state(optimizer.state)
        offload.wait_recovered()
        after = optimizer.state[p]
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        same = {name for name in tensors if after[name] is tensors[name]}
        assert same == tensors.keys() - ({"exp_avg"} if step == 2 else set())
        optimizer.step()


@pytest.mark.parametrize("active", [False, True])
def test_other_gradients_are_set_within_the_block(active: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(4)]
    fast = [torch.full((4,), 1.0), None, torch.full((4,), 3.0), torch.full((4,), 4.0)]
    slow = [torch.full((4,), 10.0), torch.full((4,), 20.0), None, torch.full((4,), 40.0)]
    for p, gradient in zip(parameters, fast, strict=True):
        p.grad = gradient
    offload = Offload(CPU, 16, active)
    with offload.gradients_replaced(parameters, [g if g is None else g.clone() for g in slow]):
        for p, gradient in zip(parameters, slow, strict=True):
            assert (p.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(p.grad, gradient)
        assert (parameters[0].grad.data_ptr() == fast[0].data_ptr()) == active
        parameters[0].grad.mul_(7)
        parameters[3].grad = None  # by a hook of the optimizer
    for p, gradient, value in zip(parameters, fast, (1.0, 0.0, 3.0, 4.0), strict=True):
        assert p.grad is gradient
        assert gradient is None or bool((gradient == value).all())


@pytest.mark.parametrize(
    ("world", "cases"),
    tiers.chosen(
        [(2, [("adamw", "clipping")])],
        [(2, [("sgd", "accumulating"), ("adamw", "clipping"), ("adamw fused", "scaling")])],
        [
            (2, [("sgd", "views"), ("adamw", "clipping"), ("adamw fused", "scaling")]),
            (3, [("nadam", ""), ("adam", "accumulating"), ("tensor lr", "views")]),
        ],
    ),
)
def test_with_fp32_as_the_fast_mean_training_is_that_without_duo(
    world: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    first, *others = run("identical", world, tmp_path, cases=cases, offload=True)
    assert all(other == first for other in others)
    for name, result in first.items():
        assert result["ahead"] == result["alone"], name
        assert result["scale"][0] == result["scale"][1]
        assert result["skipped"] == int("scaling" in name)


@tiers.ALL
def test_memory_of_copies_does_not_change_results(tmp_path: Path) -> None:
    for result in run("offloaded", 2, tmp_path):
        for name, ends in result.items():
            assert len(ends) == 4
            assert all(end == ends[0] for end in ends), name


@pytest.mark.parametrize("sharded", [False, True])
def test_device_memory_is_that_of_training_without_duo(sharded: bool, tmp_path: Path) -> None:
    job = {"codec": "duo4", "device": "cpu", "width": 128, "sharded": sharded}
    for result in memory(2, tmp_path, offload=True, **job):
        assert result["duo"] <= 1.05 * result["plain"], result
        assert result["host"] > 0
        assert "copies in host memory, by a bridge of 0.012 MB" in result["printed"]
    for result in memory(2, tmp_path / "device", offload=False, **job):
        assert result["duo"] > 1.2 * result["plain"], result
        assert "host memory" not in result["printed"]
