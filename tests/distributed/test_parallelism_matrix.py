"""Data parallelism of torch in all variants, with another plan on each rank: graphs are compiled
and replicas are bit-identical.

A world runs all variants in one start, and the rest in another after a failure. The fast tier tests
DistributedDataParallel in test_ddp.py.
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
"""Time limit of a variant, and the time after which no variant starts, in seconds; all take 30."""


@functools.cache
def trained(world: int) -> dict[str, list[dict[str, Any]] | str]:
    """Return each rank's result of each variant, or the variant's error, after which a new world
    trains the remaining variants.
    """
    results: dict[str, list[dict[str, Any]] | str] = {}
    remaining, until = list(WAYS), time.monotonic() + ALL_OF_THEM
    while remaining and (seconds := until - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            ended = ranks.run(
                "matrix_rank.py", world, Path(folder), seconds, cases=remaining, each=EACH
            )
        reports = [rank.result or {} for rank in ended]
        completed = [
            variant for variant in remaining if all(variant in report for report in reports)
        ]
        results |= {variant: [report[variant] for report in reports] for variant in completed}
        if len(completed) == len(remaining) and all(rank.code == 0 for rank in ended):
            break
        failed = remaining[min(len(completed), len(remaining) - 1)]
        results[failed] = "\n".join(f"{rank.code}: {rank.log[-3000:]}" for rank in ended)
        remaining = remaining[remaining.index(failed) + 1 :]
    return results


@tiers.ALL
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "world"), [(variant, world) for world in (2, 3) for variant in WAYS]
)
def test_replicas_are_equal_to_the_last_bit(variant: str, world: int) -> None:
    results = trained(world).get(variant, "not begun: other ways took all of the time")
    assert not isinstance(results, str), results
    assert all(rank["graphs"] for rank in results)
    assert [rank["precisions"] for rank in results] == [
        ["fp32"],
        *([["bf16", "int8"]] * (world - 1)),
    ]
    # A rank whose inputs never reach a branch does not compile it.
    uncompiled = 1 if variant == "different branches" else 0
    assert [rank["uncovered"] for rank in results] == [0, *[uncompiled] * (world - 1)], (
        "all modules that a rank calls are compiled"
    )
    assert len({rank["weights"] for rank in results}) == 1
    assert all(rank["moved"] for rank in results)
    assert all(rank["finite"] == (variant != "NaN on one rank") for rank in results)


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
