"""GPU kernel times from events, tested with a simulated device and wrapper."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from qsync_fx.profiler.timing.inductor_lines import attribute, watching
from qsync_fx.profiler.timing.step_timers import (
    StepSeconds,
    TrainingStep,
    compiling,
    timing_kernels,
)

WRAPPER = """
def call(wait, kernel):
    begun = 1
    kernel(3)
    wait()
    kernel(
        2
    )
    kernel(1)
    return begun
"""


class Clockwork:
    """A simulated device whose kernels have requested durations, independent of Python's time."""

    def __init__(self) -> None:
        self.done, self.held = 0.0, 0

    def mark(self) -> float:
        return self.done

    def hold(self) -> None:
        self.held += 1

    def between(self, first: Any, last: Any) -> float:
        return float(last - first)

    def kernel(self, seconds: float) -> None:
        self.done += seconds


def stepped(device: Clockwork, step_seconds: StepSeconds) -> dict[tuple[int, bool], float]:
    space: dict[str, Any] = {}
    exec(compile(WRAPPER, "wrapper.py", "exec"), space)
    with timing_kernels({"wrapper.py": {4, 6, 9}}, device) as queued:
        for backward in (False, True):
            queued.clock()
            queued.backward = backward
            device.kernel(5)  # outside, before
            space["call"](lambda: time.sleep(0.05), device.kernel)
            device.kernel(7)  # outside, after
        queued.clock()
    return {
        (line, backward): duration
        for (_, line, backward), duration in queued.seconds(step_seconds).items()
    }


def test_kernel_time_equals_device_time_on_a_busy_device() -> None:
    device = Clockwork()
    result = stepped(device, StepSeconds(18.0, 18.0, 0.0))
    assert {line: duration for line, duration in result.items() if duration} == {
        (line, backward): seconds
        for backward in (False, True)
        for line, seconds in ((4, 3.0), (6, 2.0), (9, 1.0))
    }
    assert device.held == 3


def test_launch_delays_are_attributed_to_python_lines() -> None:
    result = stepped(Clockwork(), StepSeconds(18.0, 28.0, 0.0))
    assert sum(
        duration for (_, backward), duration in result.items() if not backward
    ) == pytest.approx(6.0)
    assert sum(duration for (_, backward), duration in result.items() if backward) == pytest.approx(
        16.0
    )
    # The line that sleeps launches no kernel and has nearly all of the delay.
    assert result[5, True] > 9.0


def test_long_wrapper_blocks_the_device_again() -> None:
    device = Clockwork()
    space: dict[str, Any] = {}
    lines = "".join("    kernel(1)\n" for _ in range(600))
    exec(compile(f"def call(kernel):\n{lines}", "long.py", "exec"), space)
    with timing_kernels({"long.py": range(2, 602)}, device) as queued:
        queued.clock()
        space["call"](device.kernel)
        queued.clock()
    result = queued.seconds(StepSeconds(600.0, 0.0, 0.0))
    assert sum(result.values()) == 600.0
    assert device.held == 4


def test_a_step_of_inductor_is_shared_out_among_its_operators() -> None:
    """The clock is the CPU's, which runs kernels synchronously."""

    class Processor(Clockwork):
        def mark(self) -> float:
            return time.perf_counter()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8))
    training = TrainingStep(
        lambda model, x: model(x).square().mean(),
        torch.randn(512, 256),
        None,
        model.zero_grad,
        time.perf_counter,
    )
    with compiling() as compile_under, watching() as files:
        compiled = compile_under(model, {"precision": "bf16"}, training)
        measured = training.run(compiled)
        with (
            timing_kernels(files, Processor()) as queued,
            torch.autograd.set_multithreading_enabled(False),
        ):
            TrainingStep(training.step, training.batch, None, training.zero, queued.clock).run(
                compiled, queued
            )
    result = attribute(queued.seconds(measured), files)
    assert {"0", "1", "2", "3"} <= {name.split(".")[0].split("/")[0] for name in result.operators}
    assert all(forward > 0 and backward > 0 for forward, backward in result.operators.values())
