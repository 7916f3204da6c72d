"""Codecs in the reduce-scatter of FSDP2, in processes over gloo."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.processes import ranks

CODECS = ["fp32", "fp16", "qsgd8", "bf16", "qsgd4", "qsgd16", "1bit*", "qsgd2"]

run = functools.partial(ranks.results, script="sharded_rank.py")


@pytest.mark.parametrize(
    ("world", "codecs"),
    tiers.chosen([(2, ["fp32", "qsgd8"])], [(2, CODECS), (3, CODECS[::2])]),
)
def test_codecs_reduce_and_scatter(world: int, codecs: list[str], tmp_path: Path) -> None:
    for results in run("codecs", world, tmp_path, codecs=codecs):
        assert results["plain"] < 1e-5
        for name in codecs:
            result = results[name]
            assert result["equal"] == (name == "fp32"), name
            assert result["apart"] < {
                "fp32": 1e-9,
                "fp16": 1e-3,
                "bf16": 1e-2,
                "qsgd16": 1e-4,
                "qsgd8": 1 / 127,
            }.get(name, 2)
            assert result["finite"]
            assert result["steps"] == 4
            assert result["buckets"] == 4 * 4, (
                "each of four steps has a bucket per block and one for the root"
            )
            wire, raw, theory = result["wire"]
            assert wire <= 1.03 * theory + 100 * result["buckets"] * (world - 1), name
            assert (result["variance"] == 0) == (name == "fp32")
            assert f"{name} on rank" in result["printed"]
            assert "replicas" not in result["printed"]
            if name == "qsgd8":
                assert wire < 0.35 * raw


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_stochastic_rounding_is_unbiased(world: int, tmp_path: Path) -> None:
    draws = 50
    for result in run("unbiased", world, tmp_path, draws=draws):
        assert result["differ"]
        assert result["one"] < 1 / 7
        assert result["mean"] < 5 / 7 / draws**0.5 / 2


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_resumed_training_is_bit_equal(world: int, tmp_path: Path) -> None:
    for result in run("resumed", world, tmp_path, where=str(tmp_path)):
        for codec, (expected, resumed, without) in result.items():
            assert resumed == expected, codec
            assert without != expected, codec
    if world == 2:
        for result in run("loaded", 3, tmp_path / "more", where=str(tmp_path)):
            assert len(result["warned"]) == 1
            assert "of 2, but this is rank" in result["warned"][0]


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_training_settings(world: int, tmp_path: Path) -> None:
    results = run("cases", world, tmp_path)
    for rank in results:
        assert rank["accumulates"] < 1e-5
        assert rank["unused"] and rank["bf16"] and rank["compiled"]
        assert "set_reduce_scatter_unused_params" in rank["unused with a residual"]["text"]
    assert all(rank["infinity"] for rank in results), "an infinity on one rank reaches all ranks"


@tiers.ALL
@pytest.mark.parametrize("world", [2, 4])
def test_unsupported_setting_is_an_error(world: int, tmp_path: Path) -> None:
    first, *others = run("refused", world, tmp_path, where=str(tmp_path))
    alone = [rank.pop("of one rank") for rank in (first, *others)]
    for name, kind, text in (
        ("plan", "OptionError", "a plan assigns a codec to each parameter"),
        ("missing", "PlanError", "nowhere.json"),
        ("columns", "OptionError", "encodes columns of parameters"),
        ("part", "OptionError", "FSDP does not shard the parameter"),
    ):
        assert [rank[name]["kind"] for rank in alone] == [
            "RankError",
            kind,
            *["RankError"] * (world - 2),
        ], name
        assert all(text in rank[name]["text"] for rank in alone), name
        assert all(rank[name]["rank"] == 1 for rank in alone if rank is not alone[1]), name
    assert all(
        {name: result["text"] for name, result in other.items()}
        == {name: result["text"] for name, result in first.items()}
        for other in others
    )
    texts = {name: result["text"] for name, result in first.items()}
    for name, text in {
        "columns": "encodes columns of parameters",
        "duo": "DUO requires a DistributedDataParallel",
        "differ": "another gradient codec than",
        "differ in code": "another gradient codec than",
        "part": "FSDP does not shard the parameter",
        "hybrid": "over a one-dimensional mesh",
        "twice": "already has a custom reduce-scatter",
        "factor": "set_gradient_divide_factor",
    }.items():
        assert text in texts.pop(name), name
    assert not texts


@tiers.ALL
def test_torch_distributed_debug_reports_no_error(tmp_path: Path) -> None:
    """The ranks run with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    for result in run("codecs", 2, tmp_path, codecs=["fp32", "qsgd8", "1bit*"], debug="DETAIL"):
        assert result["debug"] == "DETAIL"
        assert result["fp32"]["equal"]
        assert result["qsgd8"]["finite"] and result["1bit*"]["finite"]


@tiers.ALL
def test_corrupt_message_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for result in run("faults", 3, tmp_path, how="harm"):
        assert result["kind"] == "RankError"
        assert (
            "rank 0 cannot read the message of rank 1 for blocks.1 in step 2: its" in result["text"]
        )


@tiers.ALL
def test_a_rank_that_is_killed_is_an_error_on_all_others(tmp_path: Path) -> None:
    ended = ranks.run("sharded_rank.py", 2, tmp_path, name="faults", how="kill", limit=30)
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].code == 0, ended[0].log
    assert ended[0].result["kind"] == "RankError"
    assert "no longer responds" in ended[0].result["text"]


@tiers.ALL
def test_one_rank_trains_as_it_is(tmp_path: Path) -> None:
    (result,) = run("alone", 1, tmp_path)
    assert result["equal"]
    assert "no communication" in result["printed"]
