"""Replanning when one of two ranks changes during training: both switch to another plan once."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qsync_fx import ClusterPlan, OptionError, Plan
from qsync_fx.allocator.evaluator import evaluate_plan
from qsync_fx.devices.cpu_features import native_bf16_unit
from qsync_fx.distributed import Replanning
from qsync_fx.distributed.fleet_plan import FleetConditions
from qsync_fx.distributed.replan import (
    PlanChange,
    ReplanCause,
    ReplanCosts,
    ReplanReport,
    _with_formats,
)
from tests.support import tiers
from tests.support.distributed import replanning_rank
from tests.support.processes import ranks

STEPS, FROM = 45, 15
STEPS_PER_EPOCH = 12


@tiers.ALL
@pytest.mark.timeout(600)
@pytest.mark.skipif(not native_bf16_unit(), reason="no other plan is faster without a BF16 unit")
def test_a_device_that_changes_gets_another_plan_once(tmp_path: Path) -> None:
    first, second = ended = ranks.run(
        "replanning_rank.py", 2, tmp_path, seconds=500, name="changes", times=8.0, share=0.95
    )
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    before = ClusterPlan.from_json(first.result["before"])
    for case, change in (("slower", PlanChange.SLOWER), ("memory", PlanChange.TIGHT)):
        ours, theirs = first.result[case], second.result[case]
        assert ours["replanned"] == theirs["replanned"], "all ranks have the same reports"
        assert ours["weights"] == theirs["weights"], "weights are bit-identical on all ranks"
        assert (ours["steps"], theirs["steps"]) == (STEPS, STEPS), (
            "the optimizer state is preserved"
        )
        if case == "slower" and not any(report["after"] for report in ours["replanned"]):
            # On a CPU whose BF16 unit is slower than FP32, the survey has no other plan.
            assert not first.result["other"], ours["told"]
            continue
        decided = switched(ours["replanned"])
        assert change in {cause.change for cause in decided.causes if cause.rank == 1}, ours["told"]
        assert decided.step > FROM, "replanning happens only after the device changes"
        after = ClusterPlan.from_json(ours["after"])
        assert after.classes["slow"] != before.classes["slow"]
        assert after.classes["fast"] == before.classes["fast"], (
            "the fast class has only FP32, so its plan is unchanged"
        )
        planned = {str(precision) for precision in after.classes["slow"].operators.values()}
        assert set(theirs["used"]) == planned, (
            "the compiled operators have the formats of the active plan"
        )
        assert str(decided) in first.log and str(decided) in second.log
        if case == "slower":
            assert decided.before and decided.after
            assert decided.after.seconds < decided.before.seconds
    memory = switched(first.result["memory"]["replanned"])
    (tight,) = (cause for cause in memory.causes if cause.rank == 1)
    peak = float(
        ClusterPlan.from_json(first.result["memory"]["after"]).classes["slow"].notes["peak"]
    )
    assert peak <= tight.measured < tight.predicted


@tiers.ALL
@pytest.mark.timeout(600)
def test_plan_with_codecs_is_found_and_changed(tmp_path: Path) -> None:
    ended = ranks.run("replanning_rank.py", 2, tmp_path, seconds=500, name="coded")
    assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.log for rank in ended)
    first, second = (rank.result for rank in ended)
    for name in ("plan", "codecs", "weights", "after", "name", "checks", "ratio"):
        assert first[name] == second[name], name
    assert set(first["codecs"].values()) <= {"qsgd8", "1bit*"}
    assert "0.weight" in first["codecs"]
    assert first["note"] == "fp32 qsgd8 1bit*"
    assert first["after"] == {"0.weight": "qsgd4"}
    assert first["name"] == "a plan's qsgd4"
    assert first["ratio"] < 0.9
    for name in ("none", "other"):
        assert "replanning has no compression" in first[name]["text"], name


@tiers.ALL
@pytest.mark.timeout(600)
def test_samples_move_from_a_rank_that_becomes_slower(tmp_path: Path) -> None:
    first, second = ended = ranks.run(
        "replanning_rank.py", 2, tmp_path, seconds=500, name="moves", times=8.0
    )
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    ours, theirs = first.result, second.result
    for name in ("before", "after", "replanned", "weights"):
        assert ours[name] == theirs[name], name
    assert "the sampler has the batch sizes [1, 511]" in ours["other batches"]["text"]
    assert sum(ours["before"].values()) == sum(ours["after"].values()) == 512
    assert 4 <= ours["after"]["slow"] < ours["before"]["slow"]
    reports = [ReplanReport.from_dict(decided) for decided in ours["replanned"]]
    report = next(item for item in reports if item.start is not None and item.step > FROM)
    assert PlanChange.SLOWER in {cause.change for cause in report.causes if cause.rank == 1}
    assert report.formats_stay
    assert report.before and report.after and report.after.seconds < report.before.seconds
    assert report.after.batches["slow"] < report.before.batches["slow"]
    assert str(report) in first.log and str(report) in second.log
    assert "samples move from step" in str(report) and "recompiled once" in str(report)
    assert "the plan's local batch is" not in first.log + second.log
    for rank, name in ((ours, "fast"), (theirs, "slow")):
        assert [len(samples) for samples in rank["samples"]] == active_batches(rank, name, reports)
    steps = [[*a, *b] for a, b in zip(ours["samples"], theirs["samples"], strict=True)]
    for start in range(0, len(steps), STEPS_PER_EPOCH):
        used = itertools.chain(*steps[start : start + STEPS_PER_EPOCH])
        assert sorted(used) == list(range(replanning_rank.SAMPLES)), (
            "each sample is used once per epoch"
        )
    model, data = replanning_rank.network(), replanning_rank.dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in steps:
        optimizer.zero_grad()
        replanning_rank.loss_of(model, data[samples][0]).backward()
        optimizer.step()
    for exact, values in zip(model.parameters(), ours["weights"], strict=True):
        expected = exact.detach().flatten()
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-3, atol=1e-5)


def active_batches(result: dict[str, Any], name: str, reports: list[ReplanReport]) -> list[int]:
    """Return the batch of a class in each step, by the reported moves."""
    batches = []
    for index in range(len(result["samples"])):
        batch = result["before"][name]
        for report in reports:
            if report.start is not None and report.start <= divmod(index, STEPS_PER_EPOCH):
                assert report.after is not None
                batch = report.after.batches[name]
        batches.append(batch)
    return batches


def switched(reports: list[dict[str, Any]]) -> ReplanReport:
    """Return the only report of a switch to another plan."""
    (report,) = (
        candidate
        for entry in reports
        if (candidate := ReplanReport.from_dict(entry)).after is not None
    )
    return report


def test_samples_move_first_and_formats_second() -> None:
    survey = replanning_rank.surveyed(replanning_rank.proportional_profile(["fp32", "fp16"]))
    active = survey.answer()
    survey = survey.at_batches(active)
    slower = FleetConditions({"slow": 4.0})
    problem = survey.problem(slower)
    before = evaluate_plan(problem, active.plans)
    assert problem.cluster.devices["slow"].batch == active.batches["slow"]
    after, result = survey.move_samples(active, slower)
    assert sum(result.batches.values()) == sum(active.batches.values()) == 512
    assert 4 <= result.batches["slow"] < active.batches["slow"]
    assert result.evaluation.seconds < before.seconds
    assert after.batches == result.batches == after.answer(slower).batches
    assert after.paces == {"fast": 1.0, "slow": 1.0}
    # Formats change only if that gains more than the limit.
    samples_only = _with_formats(active, result, gain=100.0)
    assert samples_only.plans == active.plans and samples_only.batches == result.batches
    assert samples_only.evaluation == evaluate_plan(result.problem, active.plans)
    assert _with_formats(result, samples_only, gain=100.0).plans == result.plans


def test_a_measured_run_of_a_plan_counts_at_other_batches() -> None:
    survey = replanning_rank.surveyed(replanning_rank.proportional_profile(["fp32", "fp16"]))
    active = survey.answer()
    survey = survey.at_batches(active)
    profile = survey.profiles["slow"]
    runs = [replace(run, planned=True, label="plan").at_pace(2.0) for run in profile.runs]
    corrected = replace(profile, runs=[*profile.runs, *runs])
    measured = replace(survey, profiles={**survey.profiles, "slow": corrected})
    after, _ = measured.move_samples(active, FleetConditions())
    assert after.paces == {"fast": 1.0, "slow": pytest.approx(2.0, rel=0.3)}
    again, _ = after.move_samples(active, FleetConditions())
    assert again.paces == pytest.approx(after.paces)


def test_decision_is_reported_with_numbers() -> None:
    causes = (
        ReplanCause(1, "t4", PlanChange.SLOWER, 0.01, 0.03),
        ReplanCause(2, "t4", PlanChange.TIGHT, 4e9, 3e9),
    )
    before, after = (
        ReplanCosts(0.05, 1.0, {"t4": {"fp32": 4}}),
        ReplanCosts(0.03, 2.5, {"t4": {"int8": 3, "fp32": 1}}),
    )
    decided = ReplanReport(40, causes, before, after)
    assert str(decided).splitlines() == [
        "a new plan is active from step 41, because rank 1 (t4) computes 30 ms per step instead "
        "of the predicted 10 ms (ratio 3.00); "
        "rank 2 (t4) has 3GB of memory for a step, but its plan needs 4GB",
        "  before: 50 ms per step, variance 1; t4: 4 in fp32",
        "  after:  30 ms per step, variance 2.5; t4: 1 in fp32, 3 in int8",
        "  the model is recompiled at its next call",
    ]
    assert ReplanReport.from_dict(decided.to_dict()) == decided
    moved = ReplanReport(
        40,
        causes[:1],
        ReplanCosts(0.05, 1.0, {"t4": {"fp32": 4}}, {}, {"t4": 16}),
        ReplanCosts(0.03, 1.0, {"t4": {"fp32": 4}}, {}, {"t4": 8}),
        start=(2, 7),
        formats_stay=True,
    )
    assert str(moved).splitlines()[1:] == [
        "  before: 50 ms per step, variance 1; t4: 4 in fp32; samples: 16 on t4",
        "  after:  30 ms per step, variance 1; t4: 4 in fp32; samples: 8 on t4",
        "  samples move from step 7 of the sampler's epoch 2 on; a model that is compiled for one "
        "batch size is recompiled once",
    ]
    assert ReplanReport.from_dict(json.loads(json.dumps(moved.to_dict()))) == moved
    unchanged = ReplanReport(40, causes[:1], before, None, "the active plan is still the best one")
    assert "the plan stays active after step 40, although rank 1 (t4) computes 30 ms" in str(
        unchanged
    )
    assert ReplanReport.from_dict(unchanged.to_dict()) == unchanged


def test_plan_without_measurement_is_rejected() -> None:
    plan: Any = ClusterPlan({"a": Plan.uniform("fp32")}, ranks=["a"])
    with pytest.raises(
        OptionError, match="a FleetPlan with its measurements, not a value of type ClusterPlan"
    ):
        Replanning(plan)
