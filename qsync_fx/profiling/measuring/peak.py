"""The most bytes that torch's allocator holds while a step runs, to the byte.

On the CPU torch keeps no count of its own: the profiler's memory events are every allocation and every release, and their running sum is
what is held. Resident memory of the process would say what the system lends, not what a step needs.

Invariant: counted is what is held beyond what was held before the step. A release is seen only of what was allocated while events were
recorded, so the step runs twice in one recording, and the second run, which finds things as every later one does, counts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from qsync_fx import environment

_SECOND = "qsync_fx: the step whose memory is measured"


def measured_peak(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Returns the most bytes held at once while `step` runs, beyond those held before it.

    Args:
        step: runs one training step; it is called twice, so what it makes once, such as an optimizer's state, is not part of the step.
        device: what the bytes lie on.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return max(accumulate(memory_events(step)), default=0)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def memory_events(step: Callable[[], object]) -> list[int]:
    """Returns the bytes of each allocation, and with a minus of each release, of a step on the CPU, in the order of time."""
    recording = Recording()
    try:
        step()
        recording.second()
        step()
    finally:
        _, found = recording.stop()
    return found


class Recording:
    """Allocations and releases on the CPU from now on, in two parts; no other profiler may be on."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        # Kineto writes two lines for each recording on standard error, between lines of progress.
        with environment.default("KINETO_LOG_LEVEL", "6"):
            self._profiler.start()

    def second(self) -> None:
        """Begins the second part."""
        with record_function(_SECOND):
            pass

    def stop(self) -> tuple[list[int], list[int]]:
        """Returns the bytes of each allocation, and with a minus of each release, of both parts, in the order of time."""
        self._profiler.stop()
        recorded: Any = self._profiler.profiler
        events = recorded.kineto_results.events()
        begin = next((event.start_ns() for event in events if event.name() == _SECOND), float("inf"))
        found = [event for event in events if event.name() == "[memory]" and event.device_type().name == "CPU"]
        found.sort(key=lambda event: event.start_ns())
        first = [event.nbytes() for event in found if event.start_ns() < begin]
        return first, [event.nbytes() for event in found[len(first) :]]
