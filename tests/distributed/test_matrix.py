"""Every way that torch has to train on several ranks, a plan of its own on each: graphs are compiled, and replicas equal to the last bit.

A world is started once for all of its ways. Of DistributedDataParallel the fast tier has test_ddp.py.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import matrix_rank
import pytest
import ranks
import tiers

WAYS = (
    "DDP(compile)",
    "compile(DDP), several buckets",
    "FSDP2",
    "DDP(compile), several buckets",
    "compile(DDP)",
    "compile(DDP), optimize_ddp off",
    "bucket view",
    "static graph",
    "different branches",
    "no_sync",
    "join",
    "join, weighted",
    "ZeRO",
    "checkpointing",
    "fp16 hook",
    "PowerSGD",
    "batch norm",
    "HSDP",
    "NaN on one rank",
)
THREE = ("DDP(compile)", "compile(DDP), several buckets", "FSDP2", "join, weighted", "ZeRO", "PowerSGD", "HSDP")
"""Ways in which what a rank holds, or is given of others, depends on how many there are; the others do as well among two."""


@functools.cache
def trained(world: int, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns what each rank says of each way."""
    with tempfile.TemporaryDirectory() as folder:
        ended = ranks.run("matrix_rank.py", world, Path(folder), seconds=500, cases=list(ways))
    assert [rank.code for rank in ended] == [0] * world, "\n".join(rank.log[-3000:] for rank in ended)
    return [rank.result for rank in ended]


@pytest.mark.parametrize(
    ("way", "world"),
    [
        *(pytest.param(way, 2, marks=tiers.ALL) for way in WAYS),
        *(pytest.param(way, 3, marks=tiers.ALL if way in THREE else tiers.EVERY) for way in WAYS),
    ],
)
def test_replicas_are_equal_to_the_last_bit(way: str, world: int) -> None:
    # A way that is named on the command line runs in any tier.
    ways = WAYS if world == 2 or way not in THREE else tuple(tiers.chosen(THREE, THREE, WAYS))
    found = [rank[way] for rank in trained(world, ways)]
    assert [rank["precisions"] for rank in found] == [["fp32"], *([["bf16", "int8"]] * (world - 1))]
    # Where no input of a rank takes a branch, nothing of it is compiled there.
    left = 1 if way == "different branches" else 0
    assert [rank["uncovered"] for rank in found] == [0, *[left] * (world - 1)], "all of the model is compiled"
    assert len({rank["weights"] for rank in found}) == 1
    assert all(rank["moved"] for rank in found)
    assert all(rank["finite"] == (way != "NaN on one rank") for rank in found)


@tiers.ALL
def test_a_checkpoint_of_three_ranks_goes_on_on_two_under_other_plans(tmp_path: Path) -> None:
    results = {}
    for world in (3, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        ended = ranks.run("matrix_rank.py", world, folder, checkpoint=str(tmp_path / "checkpoint"))
        assert [rank.code for rank in ended] == [0] * world, "\n".join(rank.log[-3000:] for rank in ended)
        results[world] = [rank.result for rank in ended]
    saved = {rank["saved"]["weights"] for rank in results[3]}
    assert len(saved) == 1
    assert {rank["loaded"]["weights"] for rank in results[2]} == saved
    assert len({rank["trained"]["weights"] for rank in results[2]}) == 1
    assert {rank["trained"]["weights"] for rank in results[2]} != saved
    assert [rank["trained"]["precisions"] for rank in results[2]] == [["bf16", "int8"], ["bf16"]]  # norms have no int8
    assert [rank["steps"] for rank in results[2]] == [6, 6]


def test_ways_are_those_of_the_ranks() -> None:
    assert set(matrix_rank.cases(2)) == set(WAYS)
