"""Trainer examples with two ranks, which plan, train under a guard, and classify digits."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.processes import forks, ranks

pytestmark = tiers.ALL

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "needs", "folder"),
    [
        # The trainer uses Accelerate, and its model compiles slowest.
        pytest.param("hf_trainer.py", "transformers", True, marks=tiers.EVERY),
        # docs/integrations.md and docs/howto-batches.md train with it.
        pytest.param("accelerate_loop.py", "accelerate", False, marks=tiers.EVERY),
        ("lightning_fit.py", "lightning", True),
    ],
)
def test_a_trainer_trains_each_rank_under_its_part_of_the_plan(
    script: str, needs: str, folder: bool, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    pytest.importorskip("sklearn")
    environment = forks.shell({**os.environ, **ranks.ENVIRONMENT})
    command = [
        environment["PYTHON_EXEC"],
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [str(EXAMPLES / script), *(["--folder", str(tmp_path / "kept")] if folder else [])]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=580
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-6000:]
    formats = dict(re.findall(r"rank (\d) trained in ([\w, ]+), accuracy", output))
    assert formats.keys() == {"0", "1"}, output[-6000:]
    assert formats["0"] == "fp32"
    assert set(formats["1"].split(", ")) <= {"fp32", "bf16"}
    assert all(float(share) > 0.85 for share in re.findall(r"accuracy ([\d.]+)", output)), output[
        -2000:
    ]
