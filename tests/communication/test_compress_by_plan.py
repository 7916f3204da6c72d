"""Gradient compression by a plan in processes over gloo: codecs per tensor, and different plans."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from qsync_fx.communication.codec_cost_model import coded, of_copy
from qsync_fx.communication.message_header import HEADER
from qsync_fx.devices.roofline import share
from qsync_fx.predictor.cost_mapper.times import Parameter
from tests.support import tiers
from tests.support.processes import ranks

run = functools.partial(ranks.results, script="planned_rank.py")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=tiers.ALL)])
def test_gradients_go_in_the_codecs_of_a_plan(world: int, tmp_path: Path) -> None:
    first, *others = run("plans", world, tmp_path)
    for name, result in first.items():
        assert all(other[name]["weights"] == result["weights"] for other in others), name
    mixed = first["mixed"]
    named = {"0.weight": "qsgd8", "2.weight": "qsgd4"}
    sizes = {
        "0.weight": 2400,
        "0.bias": 60,
        "2.weight": 3000,
        "2.bias": 50,
        "4.weight": 200,
        "4.bias": 4,
    }
    predicted = coded([Parameter(*item) for item in sizes.items()], named, world, of_copy(1e9, ""))
    header_bytes = HEADER * (1 if world == 2 else world)
    wire_bytes = 3 * (predicted.nbytes - header_bytes) + header_bytes * mixed["buckets"]
    assert (
        sum(rank["mixed"]["wire"] for rank in (first, *others)) == world * share(world) * wire_bytes
    )
    assert mixed["coded"] == 5400
    assert mixed["weights"] != first["none"]["weights"]
    assert "a plan's qsgd4 and qsgd8 on rank 0" in mixed["told"]
    assert first["file"]["weights"] == first["text"]["weights"] == mixed["weights"]
    for name in ("without codecs", "of a device"):
        assert first[name]["weights"] == first["none"]["weights"]
        assert first[name]["wire"] == 0
        assert "DistributedDataParallel sends all gradients uncompressed" in first[name]["told"]
    assert first["all alike"]["weights"] == first["by name"]["weights"]
    assert first["all alike"]["wire"] == first["by name"]["wire"]


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_codecs_change_in_the_middle_of_a_training(world: int, tmp_path: Path) -> None:
    """Replanning changes codecs like this; no part of a gradient is lost."""
    for result in run("changed", world, tmp_path):
        exact = [index for index, distance in enumerate(result["apart"]) if distance < 1e-5]
        assert exact == [0, 3, 6], "only FP32 stages end with exact parameters"
        assert result["left"] == [
            [],
            ["first", "second"],
            ["first", "second"],
            [],
            ["first"],
            ["second"],
            [],
        ]
        before = result["buckets"]
        assert before[0] == 0, "DistributedDataParallel reduces gradients itself without codecs"
        assert all(early < late for early, late in itertools.pairwise(before))
        assert "a plan without codecs" in result["told"]
        assert "uncompressed" not in result["told"]


def test_different_plans_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    first, second = run("differing", 2, tmp_path)
    assert first == second
    for name, reason in (
        ("tensor", "0.bias"),
        ("codec", "a plan's 1bit*"),
        ("none", "a plan without codecs"),
    ):
        assert "rank 1 has another" in first[name]["text"], name
        assert reason in first[name]["text"], name
        assert first[name]["rank"] == 1
    assert "'0.wieght', which is not a trained parameter" in first["strange"]["text"]
    assert "a plan defines which tensors are sent in FP32" in first["least"]["text"]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=tiers.ALL)])
def test_error_of_one_rank_is_raised_on_all(world: int, tmp_path: Path) -> None:
    first, second, *others = run("unread", world, tmp_path)
    for name, kind, text in (
        ("missing", "PlanError", "nowhere.json"),
        ("of another model", "PlanError", "'0.wieght', which is not a trained parameter"),
        ("argument", "OptionError", "check_every must be a number of steps, not -1"),
        ("optimizer", "OptionError", "requires a torch.optim.Optimizer"),
    ):
        assert second[name]["kind"] == kind, "the failing rank raises its own error"
        assert text in second[name]["text"], name
        for other in (first, *others):
            assert other[name]["kind"] == "RankError", name
            assert other[name]["rank"] == 1
            assert f"rank 1 has failed: {kind}" in other[name]["text"]
            assert text in other[name]["text"], name
    assert len({rank["after"] for rank in (first, second, *others)}) == 1, (
        "later collectives match on all ranks"
    )
