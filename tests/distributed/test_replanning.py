"""Two ranks of which one really changes while they train: another plan is in force once, on both,
and nothing else changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsync_fx import ClusterPlan, OptionError, Plan
from qsync_fx.devices.cpu_features import native_bf16_unit
from qsync_fx.distributed import Replanning
from qsync_fx.distributed.replan import PlanChange, ReplanCause, ReplanCosts, ReplanReport
from tests.support import tiers
from tests.support.processes import ranks

STEPS, FROM = 45, 15


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
        assert ours["replanned"] == theirs["replanned"], "all ranks are told the same"
        assert ours["weights"] == theirs["weights"], "to the last bit"
        assert (ours["steps"], theirs["steps"]) == (STEPS, STEPS), (
            "of the optimizer's state, which is kept"
        )
        decided = switched(ours["replanned"])
        assert change in {cause.change for cause in decided.causes if cause.rank == 1}, ours["told"]
        assert decided.step > FROM, "not before it has changed"
        after = ClusterPlan.from_json(ours["after"])
        assert after.classes["slow"] != before.classes["slow"]
        assert after.classes["fast"] == before.classes["fast"], "which has FP32 alone"
        planned = {str(precision) for precision in after.classes["slow"].operators.values()}
        assert set(theirs["used"]) == planned, "what is in force is what runs"
        assert str(decided) in first.log and str(decided) in second.log
    slower, memory = (switched(first.result[case]["replanned"]) for case in ("slower", "memory"))
    assert slower.before and slower.after and slower.after.seconds < slower.before.seconds
    (tight,) = (cause for cause in memory.causes if cause.rank == 1)
    peak = float(
        ClusterPlan.from_json(first.result["memory"]["after"]).classes["slow"].notes["peak"]
    )
    assert peak <= tight.measured < tight.foreseen


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


def switched(told: list[dict[str, Any]]) -> ReplanReport:
    """Returns the one decision that put another plan in force."""
    (found,) = (
        decided for one in told if (decided := ReplanReport.from_dict(one)).after is not None
    )
    return found


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
    kept = ReplanReport(40, causes[:1], before, None, "the active plan is still the best one")
    assert "the plan stays active after step 40, although rank 1 (t4) computes 30 ms" in str(kept)
    assert ReplanReport.from_dict(kept.to_dict()) == kept


def test_plan_without_measurement_is_rejected() -> None:
    plan: Any = ClusterPlan({"a": Plan.uniform("fp32")}, ranks=["a"])
    with pytest.raises(
        OptionError, match="a FleetPlan with its measurements, not a value of type ClusterPlan"
    ):
        Replanning(plan)
