"""DDP over gloo with two processes, a different plan on each rank and several buckets.

DDP compiles each bucket as a separate graph, and each graph has a node named "linear". Operators
must have the ids that they have without DDP, or a plan selects other operators.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiers
from tests.support.processes import forks, ranks


def train(folder: Path, **job: Any) -> list[dict[str, Any]]:
    """Run both ranks and return their reports; no process outlives the call."""
    environment = {**os.environ, **ranks.ENVIRONMENT}
    script = ranks.script_of("ddp_rank.py")
    started = [
        forks.start(
            script, [str(rank), str(folder), json.dumps(job)], environment, folder / f"{rank}.log"
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 150
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            if any(process.poll() for process in started):
                break  # the other rank would wait until the collective times out
            time.sleep(0.1)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    reports = [
        f"rank {rank}: {code}\n{(folder / f'{rank}.log').read_text()[-3000:]}"
        for rank, code in enumerate(codes)
    ]
    assert codes == [0, 0], "\n".join(reports)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "breaks", [False, pytest.param(True, marks=tiers.ALL)], ids=["whole", "graph break"]
)
def test_a_plan_on_each_rank_and_several_buckets(tmp_path: Path, breaks: bool) -> None:
    first, second = ranks = train(tmp_path, plans=["fp32", "mixed"], breaks=breaks)
    for rank in ranks:
        assert rank["graphs"] > rank["undivided_graphs"], "DDP has split the graph"
        assert rank["operators"] == rank["undivided"], (
            "operators have the same ids and precisions as without DDP"
        )
        assert len({name for name, _ in rank["operators"]}) == len(rank["operators"])
        assert rank["moved"]
    assert [name for name, _ in first["operators"]] == [name for name, _ in second["operators"]]
    assert {precision for _, precision in first["operators"]} == {"fp32"}
    planned = dict(map(tuple, second["operators"]))
    assert (
        planned["conv/conv2d"]
        == planned["layers.3/linear"]
        == planned["layers.3/linear#1"]
        == "int8"
    )
    assert planned["layers.1/linear"] == planned["/linear@layers.3"] == "bf16"
    assert first["weights"] == second["weights"], "weights are bit-identical on both ranks"
    assert first["losses"] != second["losses"], "each rank has its own data"
