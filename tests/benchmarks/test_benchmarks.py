"""CPU benchmarks run with `--quick` and write rows. Their speed is not tested.

Tier `all` runs one benchmark of each kind, tier `every` runs all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.processes import forks

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "against": "needs another checkout beside this one",
    "benchmarks_page": "writes docs/benchmarks.md: tests/test_site.py",
    "claims_page": "writes docs/claims.md: test_claims.py",
    "catalog": "needs the times that others published",
    "codec_accuracy": "test_paper_experiments runs it for one network",
    "codec_parameters": "test_paper_experiments runs it for one network",
    "communication_study": "reads what its paper printed",
    "hybrid": "runs the demo, which has tests of its own",
    "kernel_build": "needs nvcc",
    "links": "makes links for others: tests/benchmarks/test_links.py",
    "plots": "draws the charts of the pages: tests/test_site.py",
    "reductions": "needs several ranks: test_reductions.py",
}
MORE_OF_A_KIND = {
    "allocator": "fleets",
    "aqgb_fig3": "compressed_links",
    "attention": "quantize",
    "batch_interpolation": "replay_accuracy",
    "batch_move": "step_time",
    "bf16_pays": "quantize",
    "casts": "step_time",
    "compile_time": "step_time",
    "convergence": "table2",
    "cpu_kernels": "quantize",
    "ddp_accuracy": "replay_accuracy",
    "dropout": "step_time",
    "duo_overlap": "compressed_links",
    "fig4": "replay_accuracy",
    "fig6": "fleets",
    "full_size_sensitivity": "replay_accuracy",
    "gradient_codecs": "quantize",
    "hierarchical_links": "compressed_links",
    "huge_pages": "step_time",
    "joint_fleets": "fleets",
    "loopback": "compressed_links",
    "memory_accuracy": "replay_accuracy",
    "monitoring": "step_time",
    "native_bf16": "step_time",
    "profile_cost": "replay_accuracy",
    "saved_memory": "step_time",
    "sensitivity": "replay_accuracy",
    "slow_links": "compressed_links",
    "small_calls": "step_time",
    "table3": "replay_accuracy",
    "table4": "table2",
    "table4_unscaled": "table2",
    "table4_vgg": "table2",
    "table6": "table2",
    "trained_sensitivity": "fleets",
    "two_level_accuracy": "table2",
    "zero_point": "replay_accuracy",
}
"""Maps a benchmark to the one of its kind that tier `all` runs. Kinds: plans of models, ranks over
links, graphs, steps, kernels, replays, and tables of trainings.
"""
SCRIPTS = {
    str(path.relative_to(ROOT)): path.stem
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if path.parent.name != "gpu" and "__main__" in path.read_text() and path.stem not in ELSEWHERE
}


def test_representative_cases_run() -> None:
    assert MORE_OF_A_KIND.keys() <= set(SCRIPTS.values())
    assert set(MORE_OF_A_KIND.values()) <= set(SCRIPTS.values()) - MORE_OF_A_KIND.keys()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=tiers.EVERY if name in MORE_OF_A_KIND else tiers.ALL)
        for path, name in SCRIPTS.items()
    ],
)
def test_runs_quickly(script: str, tmp_path: Path) -> None:
    path, log = tmp_path / "rows.json", tmp_path / "log"
    status = forks.run(ROOT / script, ["--quick", "--json", str(path)], os.environ, log, tmp_path)
    assert status == 0, log.read_text()[-4000:]
    report = json.loads(path.read_text())
    assert report["quick"] and report["rows"]
