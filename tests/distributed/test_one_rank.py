"""Distributed functions with one rank or none, and the torch behaviour that they depend on."""

from __future__ import annotations

import datetime
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import ClusterPlan, OptionError, Plan
from qsync_fx.allocator.evaluator import evaluate_plan
from qsync_fx.allocator.plan_result import PredictedCost
from qsync_fx.communication.control_group import limit_of_group
from qsync_fx.distributed import average_by_batch, check_replicas, compress, guard
from qsync_fx.distributed.agreement import (
    Meeting,
    at_least,
    compiles_told,
    digests,
)
from qsync_fx.distributed.fleet_plan import FleetConditions
from qsync_fx.distributed.rank_liveness import Channel, Failure, StoreLost, has_ended, identity
from qsync_fx.errors import PlanError
from tests.support import tiers


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    limit = datetime.timedelta(seconds=7)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, timeout=limit
    )
    yield
    distributed.destroy_process_group()


def train(model: nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, check_every=1):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
    return loss.item()


def test_guard_of_a_single_rank_is_inactive(group: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fast = torch.compile(
        model, backend="qsync", options={"plan": Plan.uniform("fp32"), "inner_backend": "aot_eager"}
    )
    assert train(fast) < float(model.weight.new_tensor(10))
    assert not fast._forward_pre_hooks
    check_replicas(model)


def test_limits_of_groups_are_changed_and_put_back(group: None) -> None:
    assert limit_of_group() == 7
    with at_least(60):
        assert limit_of_group() == 60
        with at_least(30):
            assert limit_of_group() == 60
    assert limit_of_group() == 7


def test_channel_transports_texts_and_failures(group: None) -> None:
    first, second = Channel(), Channel()
    first.put("a", "text of é\n" * 1000)
    assert first.get("a") == "text of é\n" * 1000
    assert second.get("a") is None, "channels do not share messages"
    assert first.first_failure() is None
    first.report(Failure.of(0, PlanError("what", where="where", do="do")))
    first.report(Failure(1, "later"))
    failure = first.first_failure()
    assert failure == Failure(0, "rank 0 has failed: PlanError: what", "where", "do")
    assert str(failure.error()) == "rank 0 has failed: PlanError: what\n  where: where\n  do:    do"


def test_compilation_of_a_rank_is_detected(group: None) -> None:
    meeting, compiling = Meeting(60, 5), []

    @qsync_fx.graph_pass(after="lower")
    def look(graph: qsync_fx.PrecisionGraph) -> None:
        compiling.append(meeting.watcher._is_compiling)

    options = {"precision": "fp32", "inner_backend": "aot_eager", "passes": [look]}
    with compiles_told(meeting):
        torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="qsync", options=options)(
            torch.ones(2, 4)
        )
        assert not meeting.watcher._is_compiling
    assert compiling == [True]


def test_ended_process_is_detected() -> None:
    mine = identity()
    assert mine
    assert not has_ended(mine)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        theirs = " ".join([*mine.split()[:2], str(other.pid), started])
        assert not has_ended(theirs)
        assert has_ended(" ".join([*theirs.split()[:3], "1"])), (
            "a process id with another start time belongs to another process"
        )
        other.kill()
        other.wait()
        assert has_ended(theirs)
        assert not has_ended(theirs.replace(mine.split()[0], "elsewhere"))
    assert not has_ended("")


@tiers.ALL
def test_single_rank_finds_its_plan(tmp_path: Path) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    plan = qsync_fx.distributed.measure_and_plan(
        nn.Linear(16, 16),
        step,
        [torch.randn(32, 16)],
        precisions=["fp32", "bf16"],
        progress=False,
        repeats=2,
        save=tmp_path / "plan.json",
        max_replans=0,
    )
    assert plan.ranks == ("cpu",)
    assert set(plan.classes) == {"cpu"}
    saved = ClusterPlan.load(tmp_path / "plan.json")
    assert (plan == saved, saved == plan, hash(plan) == hash(saved)) == (True, True, True)
    assert type(pickle.loads(pickle.dumps(plan))) is ClusterPlan
    # The plan has its measurements, so a plan for a device three times as slow needs no others.
    assert plan.survey is not None
    assert plan.answer is not None
    assert plan.answer.problem.cluster.devices["cpu"].batch == 32
    slow = plan.survey.answer(FleetConditions({"cpu": 3.0}))
    old = plan.answer
    planned = evaluate_plan(old.problem, old.plans, old.evaluation.codecs)
    assert slow.evaluation.seconds == pytest.approx(3 * planned.seconds)
    assert PredictedCost.noted(plan.classes["cpu"].notes).computing == pytest.approx(
        plan.answer.evaluation.classes["cpu"].computing
    )
    with pytest.raises(PlanError, match=r"0\.001 MB"):
        plan.survey.answer(FleetConditions(memory={"cpu": 1000.0}))


@tiers.ALL
def test_single_rank_runs_its_plan() -> None:
    plan = qsync_fx.distributed.measure_and_plan(
        nn.Linear(16, 16),
        lambda model, x: model(x).square().mean(),
        [torch.randn(32, 16)],
        precisions=["fp32", "bf16"],
        progress=False,
        repeats=2,
        max_replans=2,
    )
    assert plan.answer is not None and plan.survey is not None
    assert 1 <= len(plan.answer.trials) <= 2 and "cpu ran " in plan.notes["answer"]
    assert any(run.planned for run in plan.survey.profiles["cpu"].runs), (
        "the survey includes the measured runs of plans"
    )


def test_invalid_settings_are_reported() -> None:
    with pytest.raises(OptionError, match=r"guard requires a torch\.nn\.Module"):
        guard(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="compiling must be a positive number of seconds, not 0"):
        guard(nn.Linear(1, 1), compiling=0)
    with pytest.raises(OptionError, match="check_every must be a number of steps, not -1"):
        guard(nn.Linear(1, 1), check_every=-1)
    with pytest.raises(OptionError, match="requires a DistributedDataParallel or FSDP model"):
        average_by_batch(nn.Linear(1, 1))
    assert issubclass(StoreLost, Exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": "a"}, "seed must be an integer, not 'a'"),
        ({"least": -1}, "least must be a number of values, not -1"),
        ({"check_every": 1.5}, "check_every must be a number of steps, not 1.5"),
        ({"check_every": -1}, "check_every must be a number of steps, not -1"),
    ],
)
def test_numbers_that_compress_cannot_take_are_refused(
    group: None, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        compress(DistributedDataParallel(nn.Linear(4, 4)), "qsgd8", **arguments)


def test_invalid_compression_state_is_rejected(group: None) -> None:
    handle = compress(DistributedDataParallel(nn.Linear(4, 4)), "qsgd8")
    with pytest.raises(OptionError, match="not a state of gradient compression"):
        handle.load_state_dict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_depend_on_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(700, 1000, dtype=dtype)
    before = digests(model)
    assert digests(model) == before
    for index in (0, 349_999, 699_999):
        with torch.no_grad():
            bits = model.weight.view(-1).view(torch.uint8)
            bits[index] ^= 1
            assert digests(model)["weight"] != before["weight"]
            assert digests(model)["bias"] == before["bias"]
            bits[index] ^= 1
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0))
    assert digests(model)["weight"] != before["weight"]
