"""DUO in processes over gloo: lookahead steps with few bits, committed steps in full precision."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

import qsync_fx
from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.duo.sign_codecs import Duo
from tests.support import tiers
from tests.support.processes import ranks

OPTIMIZERS = (
    "sgd",
    "adam",
    "adamw",
    "adamw foreach",
    "adamw fused",
    "sgd fused",
    "adagrad",
    "nadam",
    "tensor lr",
)
CASES = [(optimizer, "") for optimizer in OPTIMIZERS] + [
    (optimizer, case)
    for optimizer in ("sgd", "adamw", "adamw fused")
    for case in ("accumulating", "clipping", "scaling", "views")
]


run = functools.partial(ranks.results, script="duo_rank.py")


@pytest.mark.parametrize(
    ("world", "cases"),
    tiers.chosen(
        [(2, [("sgd", "accumulating"), ("adam", ""), ("adamw", "clipping")])],
        [(2, CASES), (3, CASES[::3])],
        [(2, CASES), (3, CASES)],
    ),
)
def test_with_fp32_as_the_fast_mean_training_is_that_without_duo(
    world: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    first, *others = run("identical", world, tmp_path, cases=cases)
    assert all(other == first for other in others)
    assert len(first) == len(cases)
    for name, result in first.items():
        assert result["ahead"] == result["alone"], name
        assert result["lr"][0] == result["lr"][1] < 0.01
        assert result["scale"][0] == result["scale"][1]
        assert result["skipped"] == int("scaling" in name)


def test_states_of_a_step_follow_the_documented_transitions(tmp_path: Path) -> None:
    first, second = run("transitions", 2, tmp_path)
    assert first == second
    after_steps = ["IDLE", "AVERAGED", "AHEAD", "AVERAGED_AHEAD", "AHEAD"]
    assert first == [*after_steps, "AVERAGED_AHEAD", "AHEAD", "IDLE", "AVERAGED", "IDLE"]


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_each_step_is_that_of_the_algorithm(world: int, tmp_path: Path) -> None:
    codecs = ("duo0", "stays", "duo1", "duo2", "duo4", "duo8")
    cases = [(codec, optimizer) for codec in codecs for optimizer in ("sgd", "adam", "adamw")]
    first, *others = run("algorithm", world, tmp_path, cases=cases if world == 2 else cases[::4])
    assert all(other == first for other in others)
    for name, result in first.items():
        assert all(result["ahead"]), (name, result)
        assert result["flushed"], name
        assert result["state"], name


@tiers.ALL
def test_parameters_drift_as_little_as_they_should(tmp_path: Path) -> None:
    distances, *_ = run("drift", 2, tmp_path, steps=300)
    assert distances["duo4"] < distances["duo2"] < 1e-3
    assert distances["duo0"] < 1e-3
    assert distances["stays"] < 5e-3
    assert distances["qsgd2"] > 50 * distances["duo2"]


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_infinity_on_one_rank_skips_the_step_on_all(world: int, tmp_path: Path) -> None:
    first, *others = run("scaled", world, tmp_path)
    assert all(other == first for other in others)
    for name, result in first.items():
        assert result["finite"], name
        assert result["left out"] == 1, name
        assert result["scale"] == 8.0 * 2 / 2, name
        assert result["committed"] == 3, name


@tiers.ALL
def test_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    first, *others = run("resumed", 2, tmp_path, where=str(tmp_path))
    assert all(other == first for other in others)
    for name, (ahead, resumed_ahead, expected, resumed) in first.items():
        assert resumed_ahead == ahead, name
        assert resumed == expected, name
    first_loaded, *others_loaded = run("loaded", 3, tmp_path / "more", where=str(tmp_path))
    assert all(other["end"] == first_loaded["end"] for other in others_loaded)
    assert first_loaded["outstanding"]
    assert first_loaded["warned"] == 0, (
        "outstanding updates are those of all ranks, so none is dropped"
    )
    assert "the state belongs to Duo(fast=Qsgd(bits=2" in first_loaded["refused"]


@tiers.ALL
def test_flush_updates_parameters_at_full_precision(tmp_path: Path) -> None:
    first, second = run("evaluated", 2, tmp_path)
    for name in ("flushed", "after"):
        assert first[name][0] == first[name][1] == second[name][0]
    assert first["moved"]
    assert first["one rank"] == second["one rank"]
    reports = first["reports"]
    wire, raw, theory = reports["fast"]
    buckets, slow_buckets = reports["buckets"]
    assert slow_buckets == buckets
    assert wire <= 1.03 * theory + 32 * buckets + 40 * 9 * 3
    assert wire < 0.15 * raw
    assert reports["slow"][0] == reports["slow"][1] + 32 * slow_buckets
    assert reports["committed"] == 2
    assert reports["outstanding"]
    assert "duo2 on rank 0 of 2: 3 steps" in first["printed"]
    assert "2 steps committed, 1 outstanding, 0 skipped" in first["printed"]


@tiers.ALL
def test_unsupported_duo_setting_is_an_error(tmp_path: Path) -> None:
    first, second = run("refused", 2, tmp_path, script="duo_faults_rank.py")
    texts = {name: result["text"] for name, result in first.items() if name != "skipped"}
    for name, text in {
        "none": "requires a torch.optim.Optimizer",
        "codec": "only DUO uses an optimizer",
        "name": "did you mean 'duo",
        "closure": "a step of LBFGS requires a closure",
        "foreign": "the optimizer has parameters that the model does not train",
        "missing": "the model trains parameters that the optimizer does not have",
        "zero": "ZeroRedundancyOptimizer communicates with other ranks in its step",
        "clips": "register_step_pre_hook",
        "clips without effect": "gradients were changed between the backward pass and the step",
        "scaler": "pass a GradScaler as scaler",
        "twice": "no_sync",
        "again": "the gradients were not averaged since",
        "with a closure": "optimizer.step has arguments",
        "join": "same number of batches",
    }.items():
        assert text in texts.pop(name), name
    assert not texts
    assert first["skipped"] == second["skipped"] == 1


@tiers.ALL
def test_different_ranks_are_an_error_before_communication(tmp_path: Path) -> None:
    first, second = run("disagreement", 2, tmp_path, script="duo_faults_rank.py")
    assert first == second
    assert "another gradient codec" in first["codec"]["text"]
    assert "Duo(" in first["way"]["text"]
    assert "another optimizer" in first["optimizer"]["text"]
    assert "lr=1.1" in first["optimizer"]["text"]


@tiers.ALL
def test_one_rank_trains_as_without_duo(tmp_path: Path) -> None:
    (result,) = run("alone", 1, tmp_path)
    assert result["ends"][0] == result["ends"][1]
    assert "no communication" in result["printed"]


@tiers.ALL
def test_a_rank_that_is_killed_in_a_slow_reduction_is_an_error_on_the_other(tmp_path: Path) -> None:
    ended = ranks.run("duo_faults_rank.py", 2, tmp_path, name="killed", full=4000, limit=30)
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].code == 0, ended[0].log
    assert ended[0].result["kind"] == "RankError"
    assert "rank 1 no longer responds" in ended[0].result["text"]


def test_a_codec_with_a_residual_is_no_fast_reduction() -> None:
    with pytest.raises(qsync_fx.OptionError, match="depends on the gradients of earlier steps"):
        Duo(Reshaped(64))
