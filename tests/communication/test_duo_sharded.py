"""DUO with a sharded optimizer in processes over gloo; parameters are sent as coded differences."""

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
    (codec, optimizer)
    for codec in ("duo0", "duo1", "duo2", "duo4")
    for optimizer in ("sgd", "adamw")
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
    for name, result in first.items():
        assert result["ours"] == result["alone"], name
        assert result["unflushed"] == result["alone"][0], name
        assert result["scale"][0] == result["scale"][1], name
        assert result["skipped"] == int("scaling" in name)


@pytest.mark.parametrize(
    ("world", "cases"), tiers.chosen([(2, WAYS[-1:])], [(2, WAYS), (4, WAYS[::3])])
)
def test_each_step_is_that_of_the_algorithm(
    world: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    for results in run("algorithm", world, tmp_path, cases=cases):
        assert len(results) == len(cases)
        for name, result in results.items():
            assert all(result["ahead"]), (name, result)
            assert result["near"], name
            assert result["lossy"], name
            assert result["flushed"], name
            assert result["state"], name


@tiers.ALL
def test_parameters_drift_as_little_as_they_should(tmp_path: Path) -> None:
    cases = [("duo32", True), ("duo2", True), ("duo4", "qsgd8")]
    distances, *_ = run("drift", 2, tmp_path, steps=300, ways=cases)
    assert distances["duo32 True"] == 0
    assert distances["duo2 True"] < 2e-3
    assert distances["duo4 qsgd8"] < 1e-3


@tiers.ALL
@pytest.mark.parametrize("world", [2, 4])
def test_rank_stores_its_shard_of_the_optimizer_state(world: int, tmp_path: Path) -> None:
    results = run("held", world, tmp_path)
    total = results[0]["whole"]
    assert sum(result["ours"] for result in results) == total
    for result in results:
        assert result["ours"] < 1.15 * total / world
        assert result["held"] < 1.15 * 2 * total / world + 1000, (
            "AdamW stores two values per parameter, DUO two more"
        )
        headers = 3 * 20 * 40 * world
        for wire, raw, theory in zip(result["wire"], result["raw"], result["theory"], strict=True):
            assert wire <= 1.03 * theory + headers
            assert theory <= raw
        gradients, slow, parameters = result["raw"]
        assert slow <= gradients
        assert result["wire"][0] < 0.2 * gradients + headers
        assert result["wire"][2] < 0.2 * parameters + headers
        assert result["checks"] == 2
        assert "memory of this rank's optimizer" in result["printed"]


@tiers.ALL
def test_clipping_uses_the_norm_over_all_ranks(tmp_path: Path) -> None:
    for result in run("clipped", 2, tmp_path):
        assert result["apart"] < 1e-5 < 1e-2 < result["unclipped"]


@tiers.ALL
def test_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    first, *others = run("resumed", 2, tmp_path, where=str(tmp_path))
    for results in (first, *others):
        for name, (ahead, resumed_ahead, expected, resumed) in results.items():
            assert resumed_ahead == ahead, name
            assert resumed == expected, name


@tiers.ALL
def test_flush_allows_resuming_on_other_ranks(
    tmp_path: Path,
) -> None:
    first, second = run("evaluated", 2, tmp_path, where=str(tmp_path))
    assert first == second
    assert first["moved"] and first["again"]
    for result in run("loaded", 4, tmp_path / "more", where=str(tmp_path)):
        assert result["ends"][0] == result["ends"][1]
        assert "optimizer has other shards" in result["other rank"]["text"]


@tiers.ALL
def test_unsupported_sharding_is_an_error(tmp_path: Path) -> None:
    first, second = run("refused", 2, tmp_path)
    assert first == second
    texts = {name: result["text"] for name, result in first.items()}
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
    for result in run("apart", 2, tmp_path):
        assert result["kind"] == "RankError"
        assert "the parameters of rank" in result["text"]
