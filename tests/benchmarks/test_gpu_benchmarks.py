"""GPU benchmarks as dry runs on a CPU, and errors of make targets without a GPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiers

ROOT = Path(__file__).resolve().parents[2]


def ran(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Remove variables that an xdist worker sets for its own children.
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    return subprocess.run(
        command,
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make smoke-gpu")
def test_smoke_reports_a_missing_gpu_before_installing_packages(
    tmp_path: Path,
) -> None:
    done = ran("make", "smoke-gpu", f"GPU_PYTHON={sys.executable}", f"GPU_OUT={tmp_path}")
    assert done.returncode and f"no GPU: torch {torch.__version__} " in done.stderr
    assert "nothing was tested" in done.stderr and not list(tmp_path.iterdir())


def test_smoke_lists_the_requirements_of_its_packages(tmp_path: Path) -> None:
    """smoke.py installs packages without dependencies: pip would shadow the machine's numpy."""
    site = tmp_path / "site"
    requires = {
        "brought": ("also-brought>1", "nowhere-else>=1.5", "pytest>=1", "if-asked; extra == 'all'",
        "old; python_version < '3'"),
        "also-brought": ("neither.there",),
        "nvidia-cutlass": ("cuda-python>=11.8",),
    }  # fmt: skip
    for name, needed in requires.items():
        folder = site / f"{name.replace('-', '_')}-2.0.dist-info"
        folder.mkdir(parents=True)
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 2.0",
            *(f"Requires-Dist: {line}" for line in needed),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    done = ran(
        sys.executable, "-c",
        "import pathlib, smoke, sys; print(*sorted(smoke.unmet(pathlib.Path(sys.argv[1]))))",
        str(site),
        PYTHONPATH=str(ROOT / "tests" / "gpu"),
    )  # fmt: skip
    assert done.stdout.split() == ["neither.there", "nowhere-else>=1.5"], done.stderr


@tiers.ALL
def test_smoke_runs_on_a_cpu_as_far_as_it_can(tmp_path: Path) -> None:
    """Stages that need a GPU are skipped; all others run."""
    out = tmp_path / "runs" / "smoke"
    done = ran(sys.executable, "tests/gpu/smoke.py", "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((out / "smoke.json").read_text())["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "versions": "passed", "kernels": "skipped", "launches": "skipped", "training": "passed",
        "speed": "passed",
    }  # fmt: skip
    # The notebook's last cell reads the same file.
    shown: dict[str, Any] = {"folder": tmp_path, "pathlib": pathlib}
    exec(cells_of_the_notebook()[-1], shown)
    assert shown["report"]["stages"] == stages
    assert stages["kernels"]["why"] == "cpu has no kernels" and "training" in done.stdout


def cells_of_the_notebook() -> list[str]:
    """Return the text of each code cell."""
    cells = json.loads((ROOT / "examples" / "gpu.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_the_same_script() -> None:
    assert any(
        cell.startswith("!") and "tests/gpu/smoke.py --install --out runs/smoke" in cell
        for cell in cells_of_the_notebook()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make test-gpu")
@pytest.mark.parametrize("target", ["test-gpu", pytest.param("bench-gpu", marks=tiers.ALL)])
def test_make_reports_a_missing_gpu(target: str) -> None:
    done = ran("make", target, f"GPU_PYTHON={sys.executable}")
    assert done.returncode and "no GPU: nothing was tested or measured" in done.stderr


@pytest.mark.parametrize(
    ("name", "only"),
    [
        # One kernel and one step benchmark; the others evaluate rows by the same code.
        pytest.param("quantize", "int8, ", marks=tiers.EVERY),
        pytest.param("linear", "", marks=tiers.ALL),
        pytest.param("conv", "", marks=tiers.EVERY),
        pytest.param("step", "BERT-base, 64 x 128 tokens: qsync int8", marks=tiers.ALL),
    ],
)
def test_benchmarks_run_dry(name: str, only: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    line = ["--quick", "--device", "cpu", "--only", only, "--json", str(path)]
    done = ran(sys.executable, f"benchmarks/gpu/{name}.py", *line)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["quick"] and "dry run" in report["environment"]["gpu"]
    assert not [row for row in report["rows"] if "error" in row], report["rows"]
    assert [row for row in report["rows"] if "target" in row]
    # A target without a measurement is neither met nor missed.
    assert all(row.get("met") is None for row in report["rows"])


@tiers.ALL
def test_benchmarks_judge_by_their_targets() -> None:
    script = (
        "from benchmarks.gpu import linear, measuring, quantize, step\n"
        "print([t.columns(v)['met'] for t, v in ((linear.INT8_STEP, 1.38), (linear.INT8_STEP, "
        "1.37), (step.OVERHEAD, 0.05), "
        "(step.OVERHEAD, 0.06), (quantize.BANDWIDTH, None), (measuring.GATE, 0.98))])"
    )
    assert (
        ran(sys.executable, "-c", script).stdout.strip() == "[True, False, True, False, None, True]"
    )
