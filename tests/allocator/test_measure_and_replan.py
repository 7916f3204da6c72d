"""Replan loop: run a plan, correct the profile and plan again, until both agree or the round limit
is reached.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import OptionError, Plan, PlanError, Profile, ProfileError
from qsync_fx.allocator import PlanNoteKind, PlanResult
from qsync_fx.allocator.measure_and_replan import ReplanLoop
from qsync_fx.predictor.cost_mapper import CostMapper, states
from qsync_fx.predictor.memory import SGD, step_memory
from qsync_fx.predictor.memory.cuda_memory import FRAGMENTATION, workspace_bytes
from qsync_fx.profiler.profile import corrected
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun
from qsync_fx.timeline.device_profiles import training_of
from tests.support import tiers
from tests.support.models.small_models import Perceptron, build
from tests.support.planning.allocation_problems import drawn_sensitivity
from tests.support.planning.measured_layer import BATCH, Counted, layer, quick


@functools.cache
def reckoned() -> Profile:
    """Return a profile of three layers on a T4, wide enough for all formats to differ."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512)
    )

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    profile = qsync_fx.catalog_profile("t4", model, step, torch.randn(2048, 512))
    return replace(profile, sensitivity=drawn_sensitivity(profile.graph))


def solve(profiles: Mapping[str, Profile]) -> PlanResult:
    return qsync_fx.find_plan(profiles["t4"], objective="fastest", budget=float("inf"))


def ran(profile: Profile, answer: PlanResult, factor: float, peak_bytes: int = 0) -> Profile:
    """Return the profile corrected by a run that took `factor` times the predicted seconds and had
    a peak of `peak_bytes`, if it is not 0.
    """
    mapper = CostMapper(profile.graph, profile.times(), answer.plan())
    step = mapper.schedule()
    seconds: dict[str, list[float]] = {op.id: [0.0, 0.0] for op in profile.graph.operators}
    for direction, entries in enumerate((step.forward, step.backward)):
        for entry in entries:
            if entry.operator:
                seconds[entry.operator][direction] += entry.seconds
    names = mapper.states().names
    operators = [
        MeasuredOperator(op.id, *state, *(factor * part for part in seconds[op.id]))
        for op, state in zip(profile.graph.operators, names, strict=True)
    ]
    totals = [sum(entry.seconds for entry in entries) for entries in (step.forward, step.backward)]
    run = MeasuredRun(
        "run",
        [(factor * totals[0], factor * totals[1], step.optimizer)] * 3,
        peak_bytes or 1,
        operators,
        planned=True,
    )
    return corrected(profile, replace(profile, runs=[run]))


def rounds_with(*factors: float, limit: int = 3) -> PlanResult:
    """Return the result if each round's plan takes `factors` times the predicted seconds."""
    profile, left = reckoned(), list(factors)
    rounds = ReplanLoop(solve({"t4": profile}), solve, limit)
    while rounds.more:
        after = ran(profile, rounds.answer, left.pop(0))
        rounds.learn({"t4": after}, {"t4": profile}, {"t4": after})
        profile = after
    assert not left, "the number of rounds equals the number of factors"
    return rounds.answer


def test_accurate_prediction_needs_one_round() -> None:
    answer = rounds_with(1.01)
    assert answer.plans == solve({"t4": reckoned()}).plans
    ((trial,),) = answer.trials
    assert (
        trial.agrees
        and trial.measured == pytest.approx(1.01 * trial.predicted, rel=1e-3)
        and answer.ran == 1
    )
    assert trial.predicted == pytest.approx(answer.evaluation.seconds)
    plan = answer.plan()
    assert plan.notes["plans measured"] == "1" and float(
        plan.notes["seconds measured"]
    ) == pytest.approx(trial.measured, rel=1e-4)
    assert "t4 ran this plan in round 1 of 1" in str(answer) and "+1.0%" in str(answer)
    assert [run.planned for run in answer.profiles["t4"].runs].count(True) == 1


def test_slower_than_predicted_plan_is_replaced() -> None:
    first = solve({"t4": reckoned()})
    answer = rounds_with(5.0, 1.0)
    assert answer.plans != first.plans and answer.ran == 2
    assert answer.evaluation.seconds < answer.trials[0][0].measured
    assert not answer.trials[0][0].agrees and answer.trials[1][0].agrees
    assert "another plan in round 1 of 2" in str(answer) and "+400.0%" in str(answer)


def test_repeated_plan_ends_the_rounds_with_its_measurement() -> None:
    """The plan is 4% slower than predicted, and still the fastest."""
    answer = rounds_with(1.04)
    assert answer.plans == solve({"t4": reckoned()}).plans and answer.ran == 1
    assert answer.evaluation.seconds == pytest.approx(answer.trials[0][0].measured, rel=1e-3), (
        "the prediction is corrected to the measured time"
    )


def test_best_measured_plan_is_used_without_agreement() -> None:
    answer = rounds_with(8.0, 6.0, 4.0)
    assert answer.ran is not None and len(answer.trials) == 3
    measured = [trial.measured for (trial,) in answer.trials]
    assert answer.trials[answer.ran - 1][0].measured == min(measured)
    assert answer.evaluation.seconds == pytest.approx(min(measured), rel=0.02)
    assert PlanNoteKind.UNSETTLED in [note.kind for note in answer.notes]


def test_plan_above_the_memory_limit_is_replaced() -> None:
    """The plan takes the predicted time; only its measured memory requires another plan."""
    profile = replace(reckoned(), optimizer_memory=SGD)
    limit = 110 * 10**6 + workspace_bytes("t4") + FRAGMENTATION

    def within(profiles: Mapping[str, Profile]) -> PlanResult:
        return qsync_fx.find_plan(
            profiles["t4"], objective="fastest", budget=float("inf"), memory=limit
        )

    first = within({"t4": profile})
    rounds, more = (
        ReplanLoop(first, within, 3),
        2 * (limit - (first.evaluation.classes["t4"].peak_bytes or 0)),
    )
    while rounds.more:
        states_now = states(profile.graph, rounds.answer.plan())
        step_bytes = step_memory(states_now, training_of(profile, sends=False)).step_bytes
        after = ran(
            profile, rounds.answer, 1.0, step_bytes + (more if rounds.answer is first else 0)
        )
        rounds.learn({"t4": after}, {"t4": profile}, {"t4": after})
        profile = after
    answer = rounds.answer
    assert answer.plans != first.plans and answer.fits
    assert [trial.agrees for (trial,) in answer.trials] == [True, True]
    assert (
        answer.trials[0][0].more_bytes == pytest.approx(more, rel=0.01)
        and answer.trials[1][0].more_bytes <= 0
    )
    assert "MB above the prediction" in str(answer)


def test_zero_rounds_return_the_first_plan() -> None:
    answer = rounds_with(limit=0)
    assert not answer.trials and answer.ran is None and "plans measured" not in answer.plan().notes
    with pytest.raises(OptionError, match="-1 rounds"):
        rounds_with(limit=-1)


def test_a_model_at_hand_is_run() -> None:
    """Times of real steps are unknown, so only the consistency of the report is checked."""
    profile = quick(layer(), Counted(), sensitivity="paper", plan=Plan.uniform("bf16"))
    profile = replace(
        profile, precisions=["fp32", "bf16"], sensitivity=drawn_sensitivity(profile.graph)
    )
    step = Counted()
    options = {
        "objective": "fastest",
        "budget": "bf16",
        "step": step,
        "repeats": 1,
        "progress": False,
    }
    answer = qsync_fx.find_plan(profile, model=layer(), batches=iter([BATCH]), **options)
    assert 1 <= len(answer.trials) <= 3 and answer.ran is not None
    runs = answer.profiles["cpu"].runs
    for (trial,) in answer.trials:
        assert trial.device == "cpu" and any(
            run.passes == trial.measured for run in runs if run.planned
        )
    assert isinstance(answer.as_plan(), Plan) and set(answer.plans["cpu"]) == {"/linear"}
    # Each round has two uncompiled steps, two of the loss alone, one compiled, two for the peak,
    # and three interleaved ones. The profile's first plan adds six if it differs.
    planned_runs = [
        next(run for run in runs if run.planned and run.passes == trial.measured)
        for (trial,) in answer.trials
    ]
    different = [
        run
        for run in planned_runs
        if run.operators[0].precision != profile.runs[0].operators[0].precision
    ]
    assert step.calls == 10 * len(planned_runs) + 6 * len(different)
    assert not qsync_fx.find_plan(
        profile, model=layer(), batches=[BATCH], max_replans=0, **options
    ).trials
    with pytest.raises(OptionError, match="there is none"):
        qsync_fx.find_plan(profile, model=layer())
    elsewhere = replace(profile, machine=replace(profile.machine, name="elsewhere"))
    with pytest.raises(ProfileError, match="no profile is of this machine"):
        qsync_fx.find_plan(elsewhere, model=layer(), batches=[BATCH], **options)
    with pytest.raises(ProfileError, match="another model"):
        qsync_fx.find_plan(profile, model=layer().eval(), batches=[BATCH], **options)


@tiers.ALL
def test_limit_exceeded_in_the_run_is_reported() -> None:
    model = build(Perceptron)
    batch = torch.randn(64, 16), torch.randn(64, 10)
    profile = qsync_fx.measure(
        model,
        Counted(),
        [batch],
        ["fp32", "bf16"],
        repeats=2,
        progress=False,
        sensitivity="second_order",
    )
    with pytest.raises(PlanError, match="seconds"):
        qsync_fx.find_plan(
            profile, target=1e-9, model=model, step=Counted(), batches=[batch], progress=False
        )
