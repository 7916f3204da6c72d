"""The demo end to end: two processes, two plans, one set of weights.

All runs train on scikit-learn's digits. The fast tier tests only the demo's data and argument
errors.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qsync_fx import ClusterPlan, Plan, Profile
from qsync_fx.devices.cpu_features import native_bf16_unit
from tests.support import tiers
from tests.support.processes.demo_runs import DIGITS, EAGER, INT8, run

pytestmark = tiers.ALL


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = tmp_path_factory.mktemp("first run") / "demo"
    plan = output.parent / "given.json"
    INT8.save(plan)
    return run(*DIGITS, *EAGER, "--plan", str(plan), "--epochs", "2", output=output), output


def weights_of(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the digests of the weights of both runs."""
    digests = re.findall(r"equal to the last bit .*SHA-256 ([0-9a-f]+)", finished.stdout)
    assert len(digests) == 2, finished.stdout + finished.stderr
    return digests


def test_both_ranks_end_with_the_same_weights_that_have_learned_something(demo: Any) -> None:
    finished, _ = demo
    assert finished.returncode == 0, finished.stdout + finished.stderr
    uniform, planned = weights_of(finished)
    assert uniform != planned
    accuracy = re.search(r"Test accuracy ([\d.]+)%", finished.stdout)
    assert accuracy and float(accuracy[1]) > 80, finished.stdout
    assert finished.stderr == ""


def test_each_rank_runs_and_explains_its_plan(demo: Any) -> None:
    finished, output = demo
    explained = [(output / f"explain-rank{rank}.txt").read_text() for rank in (0, 1)]
    assert "17 adjustable operators: 17 in fp32" in explained[0]
    assert re.search(r"stage1\.conv1/conv2d +adjustable +int8", explained[1])
    assert re.search(r"stem/conv2d +adjustable +fp32", explained[1])
    assert re.search(r"stage2\.shortcut/conv2d +adjustable +bf16", explained[1])
    assert re.search(r"operators +17 in fp32 +17 in fp32 +17 in bf16 +2 in fp32", finished.stdout)
    assert "6 in int8" in finished.stdout
    for rank in (0, 1):
        assert (output / f"explain-rank{rank}.dot").read_text().startswith("digraph")


def test_both_runs_are_timed_and_their_memory_is_counted(demo: Any) -> None:
    _, output = demo
    outcome = json.loads((output / "outcome.json").read_text())
    assert outcome["predicted"] == {} and outcome["batches"] == [24, 32]
    for training in outcome["measured"].values():
        for times, peak in zip(training["ranks"], training["peak"], strict=True):
            assert min(times.values()) > 0 and peak > 10**6
            assert max(times["computing"], times["waiting"]) < times["seconds"]
        assert training["steps"] == 2 * (1438 // 56) - 5
    peaks = [outcome["measured"][label]["peak"][1] for label in ("uniform", "planned")]
    assert peaks[0] < outcome["measured"]["uniform"]["peak"][0], (
        "BF16 with a third more images has less peak memory than FP32"
    )


@pytest.mark.timeout(900)
def test_ranks_measure_themselves_plan_and_train_under_the_plan_within_its_memory(
    tmp_path: Path,
) -> None:
    finished = run("--quick", "--plan-batches", output=tmp_path, seconds=800)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    plan = ClusterPlan.load(tmp_path / "plan.json")
    assert plan.ranks == ("training", "inference")
    assert {fmt.name for fmt in plan.classes["training"].operators.values()} == {"fp32"}
    assert {fmt.name for fmt in plan.classes["inference"].operators.values()} <= {"fp32", "bf16"}
    for role in plan.ranks:
        # The ranks' number of threads differs from this process's.
        profile = Profile.load(tmp_path / f"profile-{role}.json", any_machine=True)
        assert profile.collectives
    for label in ("uniform", "planned"):
        trace = json.loads((tmp_path / f"timeline-{label}.json").read_text())
        assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    predicted, real = outcome["predicted"]["planned"], outcome["measured"]["planned"]
    assert predicted["variance"] <= outcome["predicted"]["uniform"]["variance"]
    assert real["operators"][1] == Counter(
        fmt.name for fmt in plan.classes["inference"].operators.values()
    )
    assert predicted["peak"][1] <= outcome["memory"]
    assert sum(plan.batches.values()) == sum(outcome["batches"])
    knobs = outcome["knobs"]
    assert knobs["both: the plan"]["batches"] == [plan.batches[role] for role in plan.ranks]
    assert knobs["both: the plan"]["variance"] == predicted["variance"]
    assert knobs["uniform bf16"]["batches"] == outcome["batches"]
    assert re.search(r"images a step +24 +\d+ +32 +\d+", finished.stdout)
    assert "What the formats and the batches contribute" in finished.stdout
    if native_bf16_unit():
        # Without a BF16 unit, torch's convolutions need buffers: docs/known-issues.md.
        assert real["peak"][1] <= outcome["memory"]
    counts = Counter(fmt.name for fmt in plan.classes["inference"].operators.values())
    restored = f"{counts['fp32']} of {counts.total()} operators of rank 1 are restored to FP32"
    assert restored in finished.stdout, finished.stdout


# tests/rounding covers determinism by seed for two ranks; this test needs a second demo run.
@tiers.EVERY
def test_the_same_seed_and_plan_give_the_same_weights(demo: Any, tmp_path: Path) -> None:
    finished, _ = demo
    plan = tmp_path / "both.json"
    ClusterPlan({"training": Plan.uniform("fp32"), "inference": INT8}).save(plan)
    again = run(*DIGITS, *EAGER, "--epochs", "2", "--plan", str(plan), output=tmp_path / "out")
    assert weights_of(again) == weights_of(finished)
