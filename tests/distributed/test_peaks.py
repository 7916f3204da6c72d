"""Measured peak memory of a training step, compared with the memory limit of its plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from qsync_fx.allocator.plan_result import PredictedCost
from qsync_fx.distributed.memory_use import PeakCheck, free_bytes
from qsync_fx.plan_switching import when_called
from qsync_fx.profiler.timing.measured_memory import measured_peak
from tests.support import tiers
from tests.support.processes import ranks

SIZE = 256


def trained(memory: float, keep: bool, steps: int = 8) -> tuple[PeakCheck, int, int]:
    """Return the check of a short training, the bytes live at the start of a step, and the peak
    bytes of a step beyond them, as `measure` measures them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
    fast = torch.compile(
        model, backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, SIZE)
    check = PeakCheck(fast, "rank 1 (t4)", lambda: [optimizer])
    check.follow(PredictedCost(peak=1e6, memory=memory))
    remove = when_called(fast, check.called)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not keep)
        fast(x).square().mean().backward()
        optimizer.step()

    for _ in range(steps):
        step()
        check.stepped()
    remove()
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # Parameters, gradients of the previous step, and AdamW's two moments.
    return check, 4 * parameter_bytes, measured_peak(step)


@pytest.mark.parametrize("keep", [False, True], ids=["gradients are let go", "gradients are kept"])
def test_reported_peak_equals_the_allocator(keep: bool) -> None:
    check, baseline, step_bytes = trained(1e6, keep)
    assert check.over == pytest.approx((baseline + step_bytes) / 1e6, rel=0.05)


def test_no_warning_within_the_limit() -> None:
    check, _, _ = trained(1e9, False)
    assert check.over is not None
    check, _, _ = trained(1e9, False, steps=3)
    assert check.over is None, "the peak is not yet measured after three steps"


def test_no_measurement_during_user_profiling() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        model = torch.compile(
            nn.Linear(4, 4),
            backend="qsync",
            options={"precision": "fp32", "inner_backend": "aot_eager"},
        )
        check = PeakCheck(model, "rank 0", list)
        check.follow(PredictedCost(memory=1.0))
        for _ in range(6):
            check.called()
            check.stepped()
        assert check.over is None


def test_a_machine_has_memory_free() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or free > 0


@tiers.ALL
def test_rank_above_its_memory_limit_warns(tmp_path: Path) -> None:
    first, second = ended = ranks.run("guarded_rank.py", 2, tmp_path, name="capped")
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    assert "limit of" not in first.log, "the class of rank 0 has no memory limit"
    assert "rank 1 (slow): the peak memory of a step is" in second.log
    assert "above the plan's limit of 1KB" in second.log
    assert "do:    plan for" in second.log
    assert first.result == second.result
