"""Rounding in real processes: ranks with equal seeds round independently, and a killed run resumes
bit for bit.
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
    """Run a training that is killed under torchrun, which restarts it once; return the output of
    each rank.
    """
    folder.mkdir()
    # With torch 2.13, restarted ranks read addresses of earlier ranks from the store of torchrun.
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
            launcher.terminate()  # torchrun then ends its ranks
            printed, _ = launcher.communicate()
    assert launcher.returncode == 0, printed[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@tiers.ALL
def test_the_noise_of_the_averaged_gradient_falls_with_the_number_of_ranks(tmp_path: Path) -> None:
    ranks = run("variance", 4, tmp_path / "variance")
    assert len({rank["generator"] for rank in ranks}) == 1, (
        "torch's generators have the same state on all ranks"
    )
    variances = {int(n): value for n, value in ranks[0]["variance"].items()}
    assert variances[1] > 0
    assert all(rank["variance"]["4"] == variances[4] for rank in ranks), (
        "all ranks have the same mean gradient"
    )
    for n in (2, 4):
        assert variances[n] * n / variances[1] == pytest.approx(1, rel=0.15)


@tiers.ALL
def test_killed_run_resumes_bit_equal(tmp_path: Path) -> None:
    uninterrupted = run("whole", 2, tmp_path / "whole")
    resumed = restarted(2, tmp_path / "interrupted")
    assert [rank.pop("first") for rank in uninterrupted] == [0, 0]
    assert [rank.pop("first") for rank in resumed] == [3, 3]
    assert resumed == uninterrupted
    assert uninterrupted[0]["weights"] == uninterrupted[1]["weights"]
    assert uninterrupted[0]["losses"] != uninterrupted[1]["losses"]
