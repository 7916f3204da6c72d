"""Every benchmark of a CPU runs: what it asks of the package is still there, and its rows are written. Nothing is said of speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "catalog": "needs the times that others published",
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
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_quickly(script: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, ROOT / script, "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(path.read_text())
    assert found["quick"] and found["rows"]
