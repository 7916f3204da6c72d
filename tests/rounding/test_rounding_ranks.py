"""Rounding over real processes: ranks round independently though they are seeded alike, and a
killed run goes on to the same bits.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiers
from tests.support.processes import forks
from tests.support.processes.ranks import ENVIRONMENT, results, script_of

run = functools.partial(results, script="rounding_rank.py")


def restarted(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Runs the training that is killed by torchrun, which starts it again once; returns what each
    rank wrote.
    """
    folder.mkdir()
    # Ranks of torch 2.13 that are restarted find the addresses of those before them in the store
    # that they share with torchrun.
    environment = forks.shell({**os.environ, **ENVIRONMENT}) | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
    }
    python = environment["PYTHON_EXEC"]
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with subprocess.Popen(
        [*command, "--max-restarts=1", str(script_of("rounding_rank.py")), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            printed, _ = launcher.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # torchrun ends its ranks then
            printed, _ = launcher.communicate()
    assert launcher.returncode == 0, printed[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@tiers.ALL
def test_the_noise_of_the_averaged_gradient_falls_with_the_number_of_ranks(tmp_path: Path) -> None:
    ranks = run("variance", 4, tmp_path / "variance")
    assert len({rank["generator"] for rank in ranks}) == 1, (
        "torch's generators are where one seed leaves them"
    )
    found = {int(n): value for n, value in ranks[0]["variance"].items()}
    assert found[1] > 0
    assert all(rank["variance"]["4"] == found[4] for rank in ranks), (
        "all ranks hold the same average"
    )
    for n in (2, 4):
        assert found[n] * n / found[1] == pytest.approx(1, rel=0.15)


@tiers.ALL
def test_killed_run_resumes_bit_equal(tmp_path: Path) -> None:
    whole = run("whole", 2, tmp_path / "whole")
    resumed = restarted(2, tmp_path / "interrupted")
    assert [rank.pop("first") for rank in whole] == [0, 0]
    assert [rank.pop("first") for rank in resumed] == [3, 3]
    assert resumed == whole
    assert whole[0]["weights"] == whole[1]["weights"]
    assert whole[0]["losses"] != whole[1]["losses"]
