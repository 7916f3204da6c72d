"""Every way that torch has to train on several ranks, a plan of its own on each: graphs are
compiled, and replicas equal to the last bit.

A world is started once for all of its ways, and anew behind one that fails. Of
DistributedDataParallel the fast tier has test_ddp.py.
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiers
from tests.support.distributed import matrix_rank
from tests.support.processes import ranks

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
EACH, ALL_OF_THEM = 60, 500
"""Seconds that one way may take, and those after which no other is begun; all take 30."""


@functools.cache
def trained(world: int) -> dict[str, list[dict[str, Any]] | str]:
    """Returns what each rank says of each way, or what went wrong in it: then others train the ways
    that are left.
    """
    found: dict[str, list[dict[str, Any]] | str] = {}
    left, until = list(WAYS), time.monotonic() + ALL_OF_THEM
    while left and (seconds := until - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            ended = ranks.run("matrix_rank.py", world, Path(folder), seconds, cases=left, each=EACH)
        said = [rank.result or {} for rank in ended]
        done = [way for way in left if all(way in one for one in said)]
        found |= {way: [one[way] for one in said] for way in done}
        if len(done) == len(left) and all(rank.code == 0 for rank in ended):
            break
        failed = left[min(len(done), len(left) - 1)]
        found[failed] = "\n".join(f"{rank.code}: {rank.log[-3000:]}" for rank in ended)
        left = left[left.index(failed) + 1 :]
    return found


@tiers.ALL
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "world"), [(way, world) for world in (2, 3) for way in WAYS])
def test_replicas_are_equal_to_the_last_bit(way: str, world: int) -> None:
    found = trained(world).get(way, "not begun: other ways took all of the time")
    assert not isinstance(found, str), found
    assert all(rank["graphs"] for rank in found)
    assert [rank["precisions"] for rank in found] == [["fp32"], *([["bf16", "int8"]] * (world - 1))]
    # Where no input of a rank takes a branch, nothing of it is compiled there.
    left = 1 if way == "different branches" else 0
    assert [rank["uncovered"] for rank in found] == [0, *[left] * (world - 1)], (
        "all of the model is compiled"
    )
    assert len({rank["weights"] for rank in found}) == 1
    assert all(rank["moved"] for rank in found)
    assert all(rank["finite"] == (way != "NaN on one rank") for rank in found)


@tiers.ALL
def test_checkpoint_of_three_ranks_resumes_on_two(tmp_path: Path) -> None:
    results = {}
    for world in (3, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        ended = ranks.run("matrix_rank.py", world, folder, checkpoint=str(tmp_path / "checkpoint"))
        assert [rank.code for rank in ended] == [0] * world, "\n".join(
            rank.log[-3000:] for rank in ended
        )
        results[world] = [rank.result for rank in ended]
    saved = {rank["saved"]["weights"] for rank in results[3]}
    assert len(saved) == 1
    assert {rank["loaded"]["weights"] for rank in results[2]} == saved
    assert len({rank["trained"]["weights"] for rank in results[2]}) == 1
    assert {rank["trained"]["weights"] for rank in results[2]} != saved
    assert [rank["trained"]["precisions"] for rank in results[2]] == [
        ["bf16", "int8"],
        ["bf16"],
    ]  # norms have no int8
    assert [rank["steps"] for rank in results[2]] == [6, 6]


def test_variants_equal_the_cases_of_the_ranks() -> None:
    assert set(matrix_rank.cases(2)) == set(WAYS)
