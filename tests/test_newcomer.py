"""First steps of a newcomer, in a quarter of an hour: clone, `make demo`, `make test`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import tiers

ROOT = Path(__file__).resolve().parent.parent


@tiers.EVERY
@pytest.mark.timeout(3600)
def test_a_clone_runs_the_demo_and_the_tests(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # The clone must not depend on this pytest run or on its virtual environment.
    ours = ("PYTEST", "VIRTUAL_ENV", "QSYNC", "PYTHONPATH", "TORCHINDUCTOR", "MAKE", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def make(target: str) -> str:
        command = ["make", "-C", str(clone), target]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"make {target}\n{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    demo = make("demo")
    assert "The weights of both ranks are equal to the last bit (the plan)" in demo
    assert ": missed" not in demo  # a goal, unlike the sentence about noise
    assert list(clone.glob("runs/demo-*/report.html"))
    assert " passed" in make("test")
