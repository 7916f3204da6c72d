"""Process group without CPU tensors, like NCCL's: ranks send everything but gradients over gloo."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiers
from tests.support.processes import ranks

pytestmark = tiers.ALL


def test_ranks_measure_one_another(tmp_path: Path) -> None:
    first, second = ranks.results(
        "measured", 2, tmp_path, script="cpuless_rank.py", backend="cuda:gloo"
    )
    assert "No backend type associated with device type cpu" in first["refused"][0]
    assert all(first["refused"]), "the default group rejects CPU tensors and objects"
    assert first["routes"] == [["meta", True], ["meta", True], ["cpu", False]], (
        "two all-reduces on the GPU, then one of their times on the CPU"
    )
    assert first["numbers"] == second["numbers"]
    assert "qsgd8" in first["ways"]


def test_ranks_plan_train_and_replan(tmp_path: Path) -> None:
    first, second = ranks.results(
        "trained", 2, tmp_path, script="cpuless_rank.py", backend="cuda:gloo"
    )
    assert first["plan"] == second["plan"]
    assert first["travelled"] == ["gloo", "gloo"]
    assert first["replanned"] == second["replanned"] >= 1
    assert first["compiled"] and second["compiled"]
    for equal in ("weights", "weighted", "differing"):
        assert first[equal] == second[equal], equal
    assert first["differing"]["where"] == "1.bias"
