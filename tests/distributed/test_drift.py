"""Drift detection as a pure function: a change is detected after the patience, noise is not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from qsync_fx import OptionError
from qsync_fx.distributed.drift import (
    Drift,
    Hysteresis,
    Room,
    StepWindow,
    WindowSummary,
    drift,
    wins,
)

HOW = Hysteresis(tolerance=0.15, patience=8, cooldown=30)
WITHIN = st.floats(1 / 1.15, 1.15)
ANY = st.floats(0.1, 10)


def run(
    paces: list[float], hysteresis: Hysteresis = HOW, rooms: list[Room] | None = None
) -> list[int]:
    """Return the steps after which a single rank replans, with a cool-down after each."""
    window, decided = StepWindow(), []
    for step, pace in enumerate(paces):
        window = window.after_step(pace, rooms[step] if rooms else None, hysteresis.patience)
        if drift([window.summary(hysteresis)], ["device"]) is not None:
            decided.append(step)
            window = StepWindow(resting=hysteresis.cooldown)
    return decided


@given(st.lists(WITHIN, max_size=200))
def test_changes_within_the_tolerance_are_no_drift(paces: list[float]) -> None:
    assert run(paces) == []


@given(
    st.lists(st.lists(ANY, max_size=HOW.patience - 1), max_size=20),
    st.lists(WITHIN, min_size=20, max_size=20),
)
def test_noise_is_no_drift_within_patience(bursts: list[list[float]], between: list[float]) -> None:
    paces = [pace for burst, calm in zip(bursts, between, strict=False) for pace in (*burst, calm)]
    assert run(paces) == []


@given(st.lists(ANY, max_size=100))
def test_two_decisions_are_as_far_apart_as_they_must_be(paces: list[float]) -> None:
    steps = run(paces)
    assert all(
        after - before >= HOW.cooldown + HOW.patience for before, after in itertools.pairwise(steps)
    )
    # The first decision follows the first `patience` consecutive steps beyond the tolerance.
    first = next(
        (
            end
            for end in range(HOW.patience, len(paces) + 1)
            if _beyond(paces[end - HOW.patience : end])
        ),
        None,
    )
    assert (steps[0] + 1 if steps else None) == first


def _beyond(paces: list[float]) -> bool:
    return all(pace > 1.15 for pace in paces) or all(pace < 1 / 1.15 for pace in paces)


@given(
    st.lists(WITHIN, max_size=50),
    st.floats(1.4, 5),
    st.lists(st.floats(0.9, 1.1), min_size=8, max_size=50),
)
def test_slower_device_is_detected_after_patience(
    before: list[float], slowdown: float, noise: list[float]
) -> None:
    steps = run([*before, *(slowdown * factor for factor in noise)])
    assert steps[0] == len(before) + HOW.patience - 1


@given(st.lists(st.tuples(ANY, st.sampled_from("ab")), min_size=1, max_size=6))
def test_a_class_is_as_slow_as_its_slowest_rank(ranks: list[tuple[float, str]]) -> None:
    summaries = [
        WindowSummary(pace, slower=pace > 1.15, faster=pace < 1 / 1.15,
        allowed=1e9 * pace) for pace, _ in ranks
    ]  # fmt: skip
    classes = [name for _, name in ranks]
    result = drift(summaries, classes) or Drift()
    paces_of = {name: [pace for pace, other in ranks if other == name] for name in classes}
    assert set(result.slower) == {rank for rank, (pace, _) in enumerate(ranks) if pace > 1.15}
    assert set(result.faster) == {
        rank for rank, (_, name) in enumerate(ranks) if max(paces_of[name]) < 1 / 1.15
    }
    if result != Drift():
        assert result.paces == {name: max(paces) for name, paces in paces_of.items()}
        assert result.allowed == {name: 1e9 * min(paces) for name, paces in paces_of.items()}


@given(st.lists(st.floats(1e6, 1e12), min_size=8, max_size=40))
def test_memory_above_the_limit_is_drift(allowed: list[float]) -> None:
    rooms = [Room(size, needed=1e9) for size in allowed]
    tight = [end for end in range(8, len(rooms) + 1) if max(allowed[end - 8 : end]) < 1e9]
    assert run([1.0] * len(rooms), rooms=rooms)[:1] == [end - 1 for end in tight][:1]


def test_memory_that_is_back_counts_where_the_plan_was_made_for_less() -> None:
    rooms = [Room(2e9, 0.4e9, planned=0.5e9)] * 8
    assert run([1.0] * 8, rooms=rooms) == [7]
    assert run([1.0] * 8, rooms=[Room(2e9, 0.4e9)] * 8) == []
    assert run([1.0] * 8, rooms=[Room(0.55e9, 0.4e9, planned=0.5e9)] * 8) == []


def test_rank_with_few_steps_reports_no_state() -> None:
    assert StepWindow((9.0,) * 7, (None,) * 7).summary(HOW) == WindowSummary()
    assert drift([WindowSummary(), WindowSummary(1.0)], ["a", "b"]) is None
    assert drift([WindowSummary(), WindowSummary(2.0, slower=True)], ["a", "b"]) == Drift(
        {"b": 2.0}, slower=(1,)
    )


@given(ANY, ANY, ANY, ANY)
def test_a_plan_is_worth_compiling_for_where_it_wins_time_or_exactness(
    s: float, v: float, t: float, w: float
) -> None:
    result = wins((s, v), (t, w), True, 0.02)
    assert result == (t < 0.98 * s or (w < 0.98 * v and t <= 1.02 * s))
    assert wins((s, v), (t, w), False, 0.02)
    assert not wins((s, v), (s, v), True, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"patience": 0}, {"cooldown": -1}, {"tolerance": -0.1}, {"gain": float("nan")}]
)
def test_invalid_settings_are_reported(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Hysteresis(**wrong)  # type: ignore[arg-type]
