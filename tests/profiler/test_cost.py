"""Logged cost estimates and progress of measurements."""

from __future__ import annotations

import re

import pytest

from qsync_fx.profiler.links.joint_steps import planned_seconds
from qsync_fx.profiler.measurement import costs, sending_costs, sensitivity_costs
from qsync_fx.profiler.observed_step import ObservedStep, observed
from qsync_fx.profiler.timing.step_timers import TrainingStep, clock_for
from tests.support.planning.measured_layer import BATCH, Counted, layer, quick


@pytest.fixture(scope="module")
def observed_step() -> ObservedStep:
    model = layer()
    return observed(model, TrainingStep(Counted(), BATCH, None, model.zero_grad, clock_for(1)), {})


def _seconds(words: str) -> float:
    number, unit = words.split()
    return float(number) * {"s": 1, "minutes": 60, "hours": 3600}[unit]


def test_cost_is_logged_with_and_without_cached_code(observed_step: ObservedStep) -> None:
    assert " 6 plans with 2 batch sizes: 12 compilations and 252 steps" in costs(
        [observed_step, observed_step], 6, [7, 5]
    )
    text = costs([observed_step], 6, [7])
    assert text.startswith("measuring Linear under 6 plans: 6 compilations and 144 steps, about ")
    match = re.search(r"about (.+) with the compiled code in torch's caches, (.+) without$", text)
    assert match is not None
    cached, new = map(_seconds, match.groups())
    assert 3 * cached < new and cached < 60
    assert "minutes" not in sensitivity_costs(observed_step, "second_order", 2)


def test_steps_of_ranks_that_train_together_are_counted(observed_step: ObservedStep) -> None:
    assert sending_costs(observed_step, 1) == ""
    assert sending_costs(observed_step, 2).startswith(
        "; then steps of all 2 ranks together under 2 plans, about "
    )
    assert 15 < planned_seconds(0.001) < 25
    assert planned_seconds(4.0) == 4.0 * 4 * (3 + 5), (
        "four treatments, each with three warm-up rounds and at least five more"
    )


def test_cost_of_joint_steps_is_logged_for_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import qsync_fx.profiler.measurement as measurement

    monkeypatch.setattr(measurement, "ranks", lambda: 3)
    quick(layer(), Counted(), repeats=1, progress=True)
    assert "; then steps of all 3 ranks together" in capsys.readouterr().err
    quick(layer(), Counted(), repeats=1, progress=True, all_reduce=False)
    assert "ranks together" not in capsys.readouterr().err


def test_progress_of_a_measurement_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import qsync_fx.progress as shown

    monkeypatch.setattr(shown, "_EVERY", 0.0)
    quick(layer(), Counted(), repeats=1, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "1 of 1" in line]
    assert [line.partition(": 1")[0] for line in lines] == ["qsync: compiling", "qsync: measuring"]
    assert all("fp32" in line for line in lines)
    quick(layer(), Counted(), repeats=1, sensitivity="paper")
    assert capsys.readouterr().err == "", (
        "no progress is logged without the option, not even of the sensitivity"
    )
