"""Real processes over gloo: DUO with an optimizer that is sharded over ranks, and parameters that
travel as differences in few bits.
"""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

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
    for case in ("accumulating", "scaling", "views")
]
WAYS = [
    (way, optimizer) for way in ("duo0", "duo1", "duo2", "duo4") for optimizer in ("sgd", "adamw")
]


run = functools.partial(ranks.results, script="duo_sharded_rank.py", seconds=280)


@pytest.mark.parametrize(
    ("world", "cases"), tiers.chosen([(2, [("adamw", "")])], [(2, CASES), (4, CASES[::3])])
)
def test_in_fp32_training_is_that_of_the_optimizer_as_it_is(
    world: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    first, *others = run("identical", world, tmp_path, cases=cases)
    assert all(other == first for other in others)
    assert len(first) == len(cases)
    for name, found in first.items():
        assert found["ours"] == found["alone"], name
        assert found["unflushed"] == found["alone"][0], name
        assert found["scale"][0] == found["scale"][1], name
        assert found["skipped"] == int("scaling" in name)


@pytest.mark.parametrize(
    ("world", "cases"), tiers.chosen([(2, WAYS[-1:])], [(2, WAYS), (4, WAYS[::3])])
)
def test_each_step_is_that_of_the_algorithm(
    world: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    for found in run("algorithm", world, tmp_path, cases=cases):
        assert len(found) == len(cases)
        for name, one in found.items():
            assert all(one["ahead"]), (name, one)
            assert one["near"], name
            assert one["lossy"], name
            assert one["flushed"], name
            assert one["state"], name


@tiers.ALL
def test_parameters_drift_as_little_as_they_should(tmp_path: Path) -> None:
    ways = [("duo32", True), ("duo2", True), ("duo4", "qsgd8")]
    found, *_ = run("drift", 2, tmp_path, steps=300, ways=ways)
    assert found["duo32 True"] == 0
    assert found["duo2 True"] < 2e-3
    assert found["duo4 qsgd8"] < 1e-3


@tiers.ALL
@pytest.mark.parametrize("world", [2, 4])
def test_rank_stores_its_shard_of_the_optimizer_state(world: int, tmp_path: Path) -> None:
    everyones = run("held", world, tmp_path)
    whole = everyones[0]["whole"]
    assert sum(found["ours"] for found in everyones) == whole
    for found in everyones:
        assert found["ours"] < 1.15 * whole / world
        assert found["held"] < 1.15 * 2 * whole / world + 1000, (
            "AdamW keeps two values of each, DUO two more"
        )
        headers = 3 * 20 * 40 * world
        for wire, raw, theory in zip(found["wire"], found["raw"], found["theory"], strict=True):
            assert wire <= 1.03 * theory + headers
            assert theory <= raw
        gradients, slow, parameters = found["raw"]
        assert slow <= gradients
        assert found["wire"][0] < 0.2 * gradients + headers
        assert found["wire"][2] < 0.2 * parameters + headers
        assert found["checks"] == 2
        assert "memory of this rank's optimizer" in found["printed"]


@tiers.ALL
def test_clipping_uses_the_norm_over_all_ranks(tmp_path: Path) -> None:
    for found in run("clipped", 2, tmp_path):
        assert found["apart"] < 1e-5 < 1e-2 < found["unclipped"]


@tiers.ALL
def test_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    first, *others = run("resumed", 2, tmp_path, where=str(tmp_path))
    for found in (first, *others):
        for name, (ahead, again_ahead, whole, again) in found.items():
            assert again_ahead == ahead, name
            assert again == whole, name


@tiers.ALL
def test_flush_allows_resuming_on_other_ranks(
    tmp_path: Path,
) -> None:
    first, second = run("evaluated", 2, tmp_path, where=str(tmp_path))
    assert first == second
    assert first["moved"] and first["again"]
    for found in run("loaded", 4, tmp_path / "more", where=str(tmp_path)):
        assert found["ends"][0] == found["ends"][1]
        assert "optimizer has other shards" in found["other rank"]["text"]


@tiers.ALL
def test_unsupported_sharding_is_an_error(tmp_path: Path) -> None:
    first, second = run("refused", 2, tmp_path)
    assert first == second
    texts = {name: found["text"] for name, found in first.items()}
    for name, text in {
        "no duo": "only DUO shards the optimizer",
        "rows": "Adafactor cannot be sharded over ranks",
        "residual": "differences of parameters cannot be sent with 1bit*",
        "adaptive": "differences of parameters cannot be sent with aqgb",
        "name": "did you mean 'qsgd",
        "differ": "another optimizer",
        "clips": "handle.clip_grad_norm_",
    }.items():
        assert text in texts.pop(name), name
    assert not texts


@tiers.ALL
def test_a_rank_that_is_killed_is_an_error_on_the_other(tmp_path: Path) -> None:
    ended = ranks.run("duo_sharded_rank.py", 2, tmp_path, name="killed", limit=30)
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].code == 0, ended[0].log
    assert ended[0].result["kind"] == "RankError"
    assert "rank 1 no longer responds" in ended[0].result["text"]


@tiers.ALL
def test_different_parameters_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    for found in run("apart", 2, tmp_path):
        assert found["kind"] == "RankError"
        assert "the parameters of rank" in found["text"]
