"""Clocks of steps: thread time, or wall time if torch uses several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qsync_fx import Profile
from qsync_fx.errors import ProfileError
from qsync_fx.profiler.timing.step_timers import clock_for
from tests.support.planning.measured_layer import Counted, layer, quick

BESIDE = 0.05


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def busy() -> None:
    while time.thread_time() < BESIDE:
        pass


def test_other_threads_do_not_count_to_a_step() -> None:
    clock = clock_for(1)
    process, thread_time = time.process_time(), clock()
    other = threading.Thread(target=busy)
    other.start()
    other.join()
    thread_time, process = clock() - thread_time, time.process_time() - process
    assert process - thread_time >= BESIDE


class Waiting(Counted):
    """A step that waits in its forward pass, as a thread waits for others."""

    def __call__(self, model: Any, batch: Any) -> Any:
        time.sleep(BESIDE)
        return super().__call__(model, batch)


@pytest.mark.usefixtures("threads")
def test_with_several_threads_waiting_counts_and_operators_still_add_up_to_the_step(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(2)
    path = tmp_path / "two.json"
    profile = quick(layer(), Waiting(), optimizer=None, path=path)
    (run,) = profile.runs
    assert profile.machine.threads == 2
    assert all(forward >= BESIDE for forward, _, _ in run.steps), (
        "the clock is wall time, which includes waiting"
    )
    (linear,) = run.operators
    assert linear.forward > 0 and linear.backward > 0
    assert linear.forward + run.outside[0] == pytest.approx(run.forward)
    assert run.outside[0] >= BESIDE * 0.9, "waiting belongs to no operator"
    torch.set_num_threads(1)
    with pytest.raises(ProfileError, match="threads 2, here 1"):
        Profile.load(path)
