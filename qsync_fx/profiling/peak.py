"""The most bytes that torch's allocator holds while a step runs, to the byte.

On the CPU torch keeps no count of its own: the profiler's memory events are every allocation and every release, and their running sum is
what is held. Resident memory of the process would say what the system lends, not what a step needs.

Invariant: counted is what is held beyond what was held before the step. A release is seen only of what was allocated while events were
recorded, so the step runs twice in one recording, and the second run, which finds things as every later one does, counts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile, record_function

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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        with record_function(_SECOND):
            step()
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == _SECOND)
    found = [event for event in events if event.name() == "[memory]" and event.device_type().name == "CPU"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns()) if event.start_ns() >= begin]
