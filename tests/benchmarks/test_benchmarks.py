"""Every benchmark of a CPU runs: what it asks of the package is still there, and its rows are written. Nothing is said of speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forks
import pytest
import tiers

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "catalog": "needs the times that others published",
    "codec_accuracy": "test_paper_experiments runs it for one network",
    "communication_study": "reads what its paper printed",
    "kernel_build": "needs nvcc",
    "links": "makes links for others: tests/test_links.py",
}
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "benchmarks").rglob("*.py")
    if not path.name.startswith(("_", "gpu_")) and "__main__" in path.read_text() and path.stem not in ELSEWHERE
)


@tiers.ALL
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_quickly(script: str, tmp_path: Path) -> None:
    path, log = tmp_path / "rows.json", tmp_path / "log"
    status = forks.run(ROOT / script, ["--quick", "--json", str(path)], os.environ, log, tmp_path)
    assert status == 0, log.read_text()[-4000:]
    found = json.loads(path.read_text())
    assert found["quick"] and found["rows"]
