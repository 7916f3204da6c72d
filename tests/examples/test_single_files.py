"""Single-file examples run as their first lines describe, and stay short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.processes import ranks

pytestmark = tiers.ALL
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINES = 60
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "launcher", "expected"),
    [
        ("train_int8.py", (), ("classifier/linear", "int8", "test accuracy 9")),
        ("train_fleet.py", TORCHRUN, ("rank 0: loss", "rank 1: loss", "of the bytes of FP32")),
        ("custom_pass.py", (), ("+++ small_products_in_fp32", "only 5120 weights", "step 15")),
    ],
)
def test_example_runs(
    script: str, launcher: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    path = EXAMPLES / script
    assert len(path.read_text().splitlines()) < LINES
    process = subprocess.run(
        [sys.executable, *launcher, str(path)],
        env={**os.environ, **ranks.ENVIRONMENT},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    assert all(text in process.stdout for text in expected), process.stdout
    if launcher:
        assert (tmp_path / "runs" / "fleet.rank1.csv").exists()
