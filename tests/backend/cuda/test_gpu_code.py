"""Compilation of models to GPU machine code without a GPU, through torch.compile with the qsync
backend and Inductor.

Triton compiles every kernel that Inductor generates for a T4, an A100 and an H100; the kernels of
qsync_fx are called as planned. `make test-gpu-code` installs Triton and runs all cases; otherwise
the tier all runs a sample if Triton is available. With QSYNC_GPU_CODE=FILE, registers, spills and
shared memory of every kernel are written to that file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiers
from tests.support.cuda.absent import gpu_code

BROUGHT = Path(__file__).parents[3] / ".triton"
"""Folder of Triton, installed by `make test-gpu-code` and also used by later test runs."""
TRITON = importlib.util.find_spec("triton") is not None or (BROUGHT / "triton").is_dir()
WHOLE = os.environ.get("QSYNC_GPU_CODE", "")
FORMATS = ("fp32", "fp16", "bf16", "int8", "int8_grad", "fp8")
SAMPLE = [
    ("t4", "mlp", "int8", "kernels"),
    ("t4", "mlp", "int8", "plain"),
    ("h100", "mlp", "fp8", "kernels"),
]
GPUS = ("t4", "a100", "h100")
MODELS = ("mlp", "resnet", "bert", "gpt2")
MATRIX = [
    *((gpu, model, fmt, "kernels") for gpu in GPUS for model in MODELS for fmt in FORMATS),
    *((gpu, "mlp", fmt, "plain") for gpu in GPUS for fmt in FORMATS),
    *(("t4", model, "int8", "plain") for model in MODELS[1:]),
]  # fmt: skip
MATRIX = [
    (gpu, model, fmt, mode) for gpu, model, fmt, mode in MATRIX if (gpu, fmt) != ("t4", "bf16")
]

pytestmark = [
    tiers.ALL,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not TRITON, reason="no Triton: make test-gpu-code brings it"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_code.guard(tmp_path_factory.mktemp("guard"))


@pytest.mark.parametrize(("gpu", "model", "precision", "mode"), MATRIX if WHOLE else SAMPLE)
def test_generated_code_compiles(
    guard: Path, gpu: str, model: str, precision: str, mode: str
) -> None:
    if model != "mlp" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    command = [sys.executable, gpu_code.__file__, gpu, model, precision, mode, str(guard)]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(BROUGHT))))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if WHOLE:
        _keep(Path(WHOLE), f"{gpu}, {model}, {precision}, {mode}", report)
    assert report["ended"] and not report["lost"], "the model is traced completely, into one graph"
    broken = [kernel for kernel in report["kernels"] if kernel["why_not"]]
    assert report["kernels"] and not broken, broken
    if gpu == "t4":
        assert report["bf16"] == [], "no kernel for the T4 uses BF16"
    assert report["products"] == report["planned"], (
        "the planned kernels are called, with operands in the planned layouts"
    )
    assert report["calls"] == len(report["products"])
    # Only the H100 has FP8 units, and no FP8 convolution kernel exists.
    multiplied = precision.startswith("int8") or (
        (gpu, precision) == ("h100", "fp8") and model != "resnet"
    )
    if mode == "kernels" and multiplied:
        assert report["planned"], "some layers are large enough for a kernel"
    scaled = precision in ("int8", "int8_grad", "fp8")
    if mode == "plain" and precision.startswith("int8"):
        # Inductor generates the quantizer: no opaque operator is left that torch would compute
        # unfused.
        assert report["quantizers"] == 0 and any(
            "quantize" in kernel["name"] for kernel in report["kernels"]
        )
    if mode == "kernels":
        assert (report["quantizers"] > 0) is scaled


def _keep(path: Path, name: str, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**rows, name: report}, indent=1) + "\n")
