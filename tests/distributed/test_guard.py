"""Guard of processes over gloo: all ranks report a difference or a failed rank, and none hangs."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from qsync_fx import ClusterPlan
from tests.support import tiers
from tests.support.processes import ranks


@tiers.ALL
@pytest.mark.parametrize(
    ("arguments", "failing", "message"),
    [
        ({"sensitivity": None}, [0, 1], "planning requires the sensitivity"),
        ({"sensitivity": None}, [1], "planning requires the sensitivity"),
        ({"memory": {"gpu": 1e9}}, [0, 1], "no rank has the device class 'gpu'"),
        (
            {"hierarchical": 3, "codecs": ["qsgd8"]},
            [0, 1],
            "2 ranks cannot be divided into nodes of 3",
        ),
    ],
)
def test_wrong_arguments_of_find_plan_are_refused_on_all_ranks_before_a_step(
    arguments: dict[str, object], failing: list[int], message: str, tmp_path: Path
) -> None:
    ended = ranks.run(
        "guarded_rank.py", 2, tmp_path, name="refused", arguments=arguments, ranks=failing
    )
    for rank in ended:
        assert message in rank.result["what"], rank.log
        assert rank.result["steps"] == 0


def test_difference_is_named_on_every_rank(tmp_path: Path) -> None:
    first, second = ended = ranks.run("guarded_rank.py", 2, tmp_path, name="agreement")
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    ours, theirs = first.result, second.result
    for name, section, where in (
        ("model", "model",
        "rank 1: 0.weight float32[17, 8], 0.bias float32[17], 1.weight float32[4, 17]; rank "
"0: 0.weight float32[16, 8]"),
        ("version", "version", "rank 1: torch "),
        ("DDP", "DDP",
        "rank 1: gradient_as_bucket_view=True; rank 0: gradient_as_bucket_view=False"),
        ("plan", "plan for the cluster", "rank 1: "),
        ("replanning", "replanning",
        "rank 1: Hysteresis(tolerance=0.15, patience=20, cooldown=100, gain=0.02, links=0.5), "
"samples stay; rank 0: none"),
        ("batch", "batch", "float32 of 2 dimensions, 3 samples; rank 0:"),
    ):  # fmt: skip
        assert ours[name]["rank"] == 1
        assert ours[name]["what"] == f"rank 1 has another {section} than rank 0"
        assert where in ours[name]["where"]
        assert ours[name]["do"]
        assert theirs[name] == ours[name], "every rank raises the same error"
    assert ours["trained"] == theirs["trained"], "weights are bit-identical on all ranks"
    assert (ours["classes"], theirs["classes"]) == (["fp32"], ["bf16", "int8"])
    assert ours["replicas"] == theirs["replicas"]
    assert ours["replicas"]["where"] == "1.bias"
    assert "the parameters of rank 1 differ from those of rank 0" in ours["replicas"]["what"]
    assert "rank 1 has not reached the comparison" in ours["absent"]["what"]


@tiers.ALL
def test_layer_reached_by_other_ranks_is_not_reported(tmp_path: Path) -> None:
    first, second = ended = ranks.run("guarded_rank.py", 2, tmp_path, name="branches")
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    for rank in ended:
        assert rank.result["others"]["told"] == [[], [], [], []]
        assert rank.result["others"]["left"] == ["beside"], (
            "only the layer that no rank calls is uncovered"
        )
        once, again, *later = rank.result["beside"]["told"]
        assert (once, later) == ([], [[], []])
        assert len(again) == 1
        assert "beside (Linear): it ran, but not where compiled code calls it" in again[0]
    assert first.result["others"]["weights"] == second.result["others"]["weights"]


@tiers.ALL
def test_gradients_are_averaged_over_samples(tmp_path: Path) -> None:
    first, second = ended = ranks.run("guarded_rank.py", 2, tmp_path, name="averaging")
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    assert first.result["compiled"]
    assert max(first.result["errors"]) < 1e-6
    assert first.result == second.result


@tiers.ALL
@pytest.mark.parametrize(
    ("fault", "message", "world"),
    [
        ("plan", "has failed: PlanError: the pattern 'nowhere' selects none", 2),
        ("limit", "has failed: PlanError: Dynamo has reached torch._dynamo.config", 2),
        ("memory", "has failed: OutOfMemoryError: out of memory", 2),
        *(("kill", "has ended without a report", world) for world in (2, 3)),
        *(("stop", "has sent no heartbeat for", world) for world in (2, 3)),
    ],
)
def test_a_rank_that_fails_is_named_on_the_others(
    fault: str, message: str, world: int, tmp_path: Path
) -> None:
    # A stopped process does not end: the test waits 1 s for it after the others.
    limit, after = (6, 1) if fault == "stop" else (600, 60)
    *others, odd = ended = ranks.run(
        "guarded_rank.py", world, tmp_path, 120, after, name="fails", how=fault, limit=limit
    )
    if fault != "plan":
        (trained,) = {
            line for rank in ended for line in rank.log.splitlines() if line.startswith("trained ")
        }
        assert re.fullmatch(r"trained \w+ by [1-9]\d* operators", trained), (
            "all ranks train in compiled graphs to bit-identical weights"
        )
        assert all(trained in rank.log for rank in ended)
    for rank in others:
        assert f"rank {world - 1} {message}" in rank.log, rank.log + odd.log
        if fault == "stop":
            # Gloo cannot be interrupted: a blocked process ends itself after the group's timeout.
            assert rank.code == 1
        else:
            assert rank.code == 0
            assert f"rank {world - 1} {message}" in rank.result["what"]
            assert rank.result["rank"] == world - 1
    assert odd.code == {"kill": -signal.SIGKILL, "stop": None}.get(fault, 1)
    assert odd.result is None


@tiers.ALL
def test_the_ranks_find_the_plan_that_they_train_under(tmp_path: Path) -> None:
    first, second = ended = ranks.run(
        "guarded_rank.py", 2, tmp_path, name="finding", where=str(tmp_path), seconds=300
    )
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    ours, theirs = first.result, second.result
    assert ours["broken"][0] == "RankError"
    assert "rank 1 has failed: ValueError: this batch is broken" in ours["broken"][1]
    assert theirs["broken"] == ["ValueError", "this batch is broken"]
    assert ours["memory"][0] == "PlanError"
    assert theirs["memory"][0] == "RankError"
    assert "rank 0 has failed: PlanError" in theirs["memory"][1]
    assert ours["plan"] == theirs["plan"]
    plan = ClusterPlan.from_json(ours["plan"])
    assert plan.ranks == ("fast", "slow")
    assert plan == ClusterPlan.load(tmp_path / "plan-0.json")
    assert {choice.name for choice in plan.classes["fast"].operators.values()} == {"fp32"}
    assert "a step" in ours["printed"]
    for name in ("fast", "slow"):
        assert f"{name} ran " in ours["printed"], "every rank has run its plan"
    assert "in round 1 of 1: " in ours["printed"]
    assert ours["weights"] == theirs["weights"]


@tiers.ALL
def test_a_rank_that_is_killed_while_it_measures_itself_is_named(tmp_path: Path) -> None:
    """No other rank waits for it in a collective, so no connection reports the failure."""
    first, second = ranks.run("guarded_rank.py", 2, tmp_path, name="killed", limit=600)
    assert second.code == -signal.SIGKILL
    assert first.code == 0, first.log
    assert first.result["rank"] == 1
    assert first.result["what"] == "the process of rank 1 has ended without a report"


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_wait_for_a_slow_rank_within_the_limit(world: int, tmp_path: Path) -> None:
    ended = ranks.run("guarded_rank.py", world, tmp_path, name="patience", limit=5, slow=8)
    assert [rank.code for rank in ended] == [0] * world, "\n".join(rank.log for rank in ended)
    assert len({rank.result["weights"] for rank in ended}) == 1
    assert all(rank.result["compiled"] for rank in ended)


@tiers.ALL
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs the scheduling policies of Linux")
def test_a_process_ends_after_a_guard_however_late_gloo_frees_its_work(tmp_path: Path) -> None:
    """Without the guard torch hangs or aborts: its thread waits for the GIL, and the thread with
    the GIL waits for that thread.
    """
    ended = ranks.run("starved_rank.py", 3, tmp_path, seconds=90)
    assert [rank.code for rank in ended] == [0, 0, 0], "\n".join(rank.log for rank in ended)
    assert [rank.result for rank in ended] == ["trained"] * 3
