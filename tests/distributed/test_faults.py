"""Faults of one rank during planning: an error or the same plan on all ranks, and an unchanged plan
file.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from qsync_fx import ClusterPlan
from tests.support import tiers
from tests.support.processes import ranks

pytestmark = tiers.ALL


@pytest.mark.timeout(600)
def test_error_of_one_rank_is_reported_on_both(tmp_path: Path) -> None:
    first, second = ended = ranks.run("faults_rank.py", 2, tmp_path, seconds=500, name="survived")
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    ours, theirs = first.result, second.result
    assert ours["version"] == theirs["version"]
    assert "rank 1 has another version than rank 0" in ours["version"][1]

    plan = ClusterPlan.from_json(ours["twice"]["plan"])
    assert plan.ranks == ("both", "both"), "one class has both ranks"
    assert set(plan.classes) == {"both"}
    assert ours["twice"] == theirs["twice"]

    for fault, error, message in (
        ("class", "PlanError", "no rank has the device class 'v100'"),
        ("weights", "PlanError", "allow"),
        ("disk", "QSyncError", "cannot be written"),
    ):
        assert message in ours[fault][1], fault
        assert theirs[fault][0] == "RankError"
        assert f"rank 0 has failed: {ours[fault][0]}" in theirs[fault][1]
        assert ours[fault][0] in (error, "PlanError")
    assert ClusterPlan.load(tmp_path / "plan.json") == plan, (
        "the plan file is unchanged after a fault"
    )
    for fault in ("truncated", "nan"):
        assert theirs[fault][0] == "ProfileError", theirs[fault]
        assert "rank 1 has failed: ProfileError" in ours[fault][1]


@tiers.one_in(2)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_while_rank_0_solves_is_named(who: int, tmp_path: Path) -> None:
    ended = ranks.run("faults_rank.py", 2, tmp_path, seconds=280, name="killed", who=who)
    other = ended[1 - who]
    assert ended[who].code == -signal.SIGKILL
    assert other.code == 0, other.log
    assert other.result["told"][0] == "RankError"
    assert f"rank {who} has ended without a report" in other.result["told"][1]
