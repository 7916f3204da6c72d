"""Selection of the tests in tests/gpu for simulated GPUs.

Only torch's properties of the device are simulated; formats, kernels and reasons are as in the
tests on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsync_fx.backend.cuda.kernel_config import Arch
from tests.gpu import models

TESTS = Path(__file__).parents[2]
FORMATS = ("fp32", "fp16", "bf16", "tf32", "int8", "int8_grad", "fp8")
DEVICES = {(7, 5): "sm_75", (8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a"}
LACKS: dict[tuple[int, int], set[str]] = {
    (7, 5): {"bf16", "tf32", "fp8"}, (8, 0): {"fp8"}, (8, 9): set(), (9, 0): set(),
}  # fmt: skip
"""Formats that the units of a GPU do not multiply."""

ASKS = """
import importlib, json, sys
from types import SimpleNamespace
import torch
from qsync_fx.backend.cuda.kernel_config import BY_CAPABILITY, SHARED_MEMORY
from qsync_fx.backend.cuda.runtime import device_state
(formats, capabilities), found = json.loads(sys.argv[1]), {}
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
device_state._table = lambda index: None
for capability in map(tuple, capabilities):
    arch = BY_CAPABILITY[capability]
    torch.cuda.get_device_capability = lambda *given: capability
    torch.cuda.get_device_properties = lambda *given: SimpleNamespace(
        multi_processor_count=40, shared_memory_per_block_optin=SHARED_MEMORY[arch]
    )
    device_state.forget()
    kit = importlib.reload(importlib.import_module("tests.gpu.kit"))
    configs = kit.configs("gemm", "fprop", "dgrad", "wgrad")
    found[".".join(map(str, capability))] = {
        "arch": kit.arch(), "missing": kit.missing(), "lacks": {fmt: kit.lacks(fmt) for fmt in formats},
        "marks": [len(param.marks) for param in kit.each_of(*formats)], "here": list(kit.here(*formats)),
        "archs": sorted({config.arch for config in configs}), "multiplied": sorted({config.a for config in configs}),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def gpu_properties() -> dict[str, dict[str, Any]]:
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("QSYNC_KERNELS", "QSYNC_NVCC", "QSYNC_GPU_COLLECT")
    }
    path = os.pathsep.join([str(TESTS.parent), *sys.path])
    command = [sys.executable, "-c", ASKS, json.dumps([FORMATS, list(DEVICES)])]
    done = subprocess.run(
        command,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("capability", DEVICES)
def test_gpu_properties_are_queried(
    capability: tuple[int, int], gpu_properties: dict[str, dict[str, Any]]
) -> None:
    answer = gpu_properties[".".join(map(str, capability))]
    lacks = {fmt: why for fmt, why in answer["lacks"].items() if why}
    assert set(lacks) == LACKS[capability]
    for why in lacks.values():
        assert f"this GPU is of {capability[0]}.{capability[1]}" in why, (
            "the skip reason names the compute capability"
        )
    assert answer["here"] == [fmt for fmt in FORMATS if fmt not in lacks]
    assert answer["marks"] == [int(fmt in lacks) for fmt in FORMATS]
    if answer["missing"]:
        assert answer["missing"].startswith("no kernels: "), (
            "tests without compiled kernels are skipped with a reason"
        )
        return
    assert answer["arch"] == DEVICES[capability] and answer["archs"] == [answer["arch"]]
    assert not LACKS[capability] & set(answer["multiplied"]) and {"fp16", "int8"} <= set(
        answer["multiplied"]
    )


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize(
    ("name", "precision"), [("bert", "int8"), ("bert", "int8_grad"), ("resnet", "int8")]
)
def test_kernel_operators_of_models_are_collected(arch: Arch, name: str, precision: str) -> None:
    problems = models.problems(name, precision, arch)
    assert any(problem.a == "int8" for problem in problems)
    convolved = {"qsync::conv2d_product"} if name == "resnet" else set()
    assert models.operators_with_kernels(problems, arch) == {"qsync::gemm"} | convolved
