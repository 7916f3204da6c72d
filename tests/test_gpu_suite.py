"""The tests and benchmarks of a GPU, as far as they can be tested without one: they are collected, say why nothing ran, and can fail.

Their checks of kernels run here on kernels: those of CUTLASS 2.x that `cutlass_cpu` compiles for the CPU, and broken ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass_cpu
import pytest
import test_cuda_conv_on_cpu
import torch
from gpu import build_kernels, geometries, kit, models, run, test_conv, test_gemm, test_wrapper
from torch import Tensor

from qsync_fx.backend.cuda import ahead, candidates, kernels, toolchain
from qsync_fx.backend.cuda.config import ARCHITECTURES, KernelConfig
from qsync_fx.backend.cuda.library import Library
from qsync_fx.errors import ToolchainError

ROOT = Path(__file__).resolve().parent.parent
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make test-gpu")


def ran(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # What a worker of xdist tells its own children is not for these.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False, timeout=240
    )


@without_gpu
def test_every_kernel_has_its_tests_and_they_say_why_they_are_skipped() -> None:
    line = "-m pytest -q -p no:cacheprovider -p no:randomly --co tests/gpu".split()
    collected = ran(sys.executable, *line, QSYNC_GPU_COLLECT="all").stdout
    for config in candidates.all_configs("sm_90a"):
        assert collected.count(f"[{config.name}]") == (4 if config.operation == "gemm" else 2), config.name
    skipped = ran(sys.executable, *line[:-2], "-rs", "tests/gpu/test_memory.py").stdout
    assert "no GPU: nothing was tested" in skipped and "passed" not in skipped


@without_gpu
@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_make_says_that_there_is_no_gpu(target: str) -> None:
    done = ran("make", target, f"GPU_PYTHON={sys.executable}")
    assert done.returncode and "no GPU: nothing was tested or measured" in done.stderr


@without_gpu
@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("tests/gpu/run.py", 1, "no GPU"),
        ("tests/gpu/sanitize.py", 2, "no GPU"),
        ("benchmarks/_gpu_parts.py", 1, "no GPU"),
    ],
)
def test_scripts_without_a_gpu(script: str, status: int, says: str) -> None:
    done = ran(sys.executable, script)
    assert (done.returncode, says in done.stderr) == (status, True)


# The checks of kernels, on kernels for the CPU and on broken ones.


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelConfig, Library]:
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))
    matrices = [c for c in candidates.all_configs("sm_80") if c.operation == "gemm" and c.order == "identity"]
    chosen = [min((c for c in matrices if c.a == fmt), key=cutlass_cpu.bytes_a_tile) for fmt in ("int8", "bf16")]
    found = cutlass_cpu.build(chosen, tmp_path_factory.mktemp("gemm"), jobs=1)
    conv = test_cuda_conv_on_cpu.one_of_each()[0]
    return found | test_cuda_conv_on_cpu.build([conv], tmp_path_factory.mktemp("conv"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, libraries: dict[KernelConfig, Library]) -> list[KernelConfig]:
    """Lets the tests of a GPU take the CPU for one, with these kernels."""
    units = {kernels.unit_of(config): library for config, library in libraries.items()}
    monkeypatch.setattr(kit, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kit, "library", units.__getitem__)
    torch.manual_seed(0)
    return list(libraries)


GEMM = (
    test_gemm.test_exact_sums_are_right_to_the_last_bit,
    test_gemm.test_random_data_against_fp64,
    test_gemm.test_what_is_not_finite_stays_in_its_rows,
)
CONV = (test_conv.test_exact_sums_are_right_to_the_last_bit, test_conv.test_random_data_against_fp64)


def test_the_checks_of_a_gpu_pass_right_kernels(here: list[KernelConfig]) -> None:
    for config in here:
        for check in GEMM if config.operation == "gemm" else CONV:
            check(config)


def test_the_checks_of_a_gpu_fail_wrong_kernels(here: list[KernelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrong(*arguments: Any) -> Tensor:
            found = right(*arguments).clone()
            found[..., -1] *= 1.02
            return found

        return wrong

    monkeypatch.setattr(kit, "gemm", broken(kit.gemm))
    monkeypatch.setattr(test_conv, "run", broken(test_conv.run))
    for config in here:
        for check in GEMM[:2] if config.operation == "gemm" else CONV:
            with pytest.raises(AssertionError):
                check(config)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_convolution_kernel_is_tried_with_something(arch: Any) -> None:
    for config in candidates.all_configs(arch):
        if config.operation != "gemm":
            assert geometries.problems(config)


# What runs them.


def test_all_kernels_are_built_the_important_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "units", lambda arch: [])
    monkeypatch.setattr(models, "kernels_of", lambda asked, arch: [])
    found = build_kernels.ordered("sm_90a")
    first = ahead.of_all("sm_90a")
    assert found[: len(first)] == first
    assert set(found) == {*first, *(kernels.unit_of(config) for config in candidates.all_configs("sm_90a"))}


def test_kernels_that_the_tests_ask_for_are_built_with_them() -> None:
    """Every format and layout that the wrapper is tried with has a kernel, so that its tests are not about torch."""
    asked = test_wrapper.asked()
    names = [unit.name for unit in models.kernels_of(asked, "sm_90a")]
    for fmt in test_wrapper.FORMATS:
        assert [name for name in names if name.startswith(f"gemm_sm_90a_{fmt}_")], fmt
    assert len(asked) > 4 * len(test_wrapper.FORMATS) and len(names) < 60


def test_building_ends_when_its_time_is_over() -> None:
    since = time.monotonic()
    with pytest.raises(build_kernels.Over), build_kernels.at_most(0.2):
        time.sleep(60)
    assert time.monotonic() - since < 30
    with build_kernels.at_most(0):
        pass


@pytest.mark.parametrize(
    ("code", "seconds", "ok", "late"),
    [
        ("pass", 60, True, False),
        ("raise SystemExit(3)", 60, False, False),
        ("import time; time.sleep(60)", 1, False, True),
        ("import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)", 3, False, True),
    ],
)
def test_a_part_is_ended_at_its_time(
    code: str, seconds: float, ok: bool, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "commands", lambda *arguments: [sys.executable, "-c", code])
    monkeypatch.setattr(run, "MERCY", 0.5)
    found = run.run("kernels", tmp_path, None, seconds)
    assert (found["ok"], found["late"]) == (ok, late)
    json.dumps(found)


def test_reports_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    ran(sys.executable, "-m", "pytest", "-q", str(tmp_path), "--junitxml", str(tmp_path / "models.xml"))
    assert run.counted(tmp_path / "models.xml") == {"passed": 1, "failed": 1, "skipped": 1}
    assert run.counted(tmp_path / "none.xml") is None
    (tmp_path / "cut.xml").write_text("<testsuites><testsuite")
    assert run.counted(tmp_path / "cut.xml") is None


# Benchmarks.


@pytest.mark.parametrize(
    ("name", "only"),
    [("linear", ""), ("conv", ""), ("quantize", "int8, "), ("step", "BERT-base, 64 x 128 tokens: qsync int8")],
)
def test_benchmarks_run_dry(name: str, only: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    line = ["--quick", "--device", "cpu", "--only", only, "--json", str(path)]
    done = ran(sys.executable, f"benchmarks/gpu_{name}.py", *line)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["quick"] and "dry run" in found["environment"]["gpu"]
    assert not [row for row in found["rows"] if "error" in row], found["rows"]
    assert [row for row in found["rows"] if "target" in row]
    # Nothing is met by what was not measured.
    assert all(row.get("met") is None for row in found["rows"])


def test_benchmarks_judge_by_their_targets() -> None:
    script = (
        "import sys; sys.path.insert(0, 'benchmarks')\n"
        "import _gpu, gpu_linear, gpu_quantize, gpu_step\n"
        "print([t.judged(v)['met'] for t, v in ((gpu_linear.INT8_STEP, 1.38), (gpu_linear.INT8_STEP, 1.37), (gpu_step.OVERHEAD, 0.05), "
        "(gpu_step.OVERHEAD, 0.06), (gpu_quantize.BANDWIDTH, None), (_gpu.GATE, 0.98))])"
    )
    assert ran(sys.executable, "-c", script).stdout.strip() == "[True, False, True, False, None, True]"


def test_configurations_of_the_suite_are_real() -> None:
    """`kit.configs` with no GPU has a kernel of each format, and sizes that the rules of kernels let through."""
    for config in kit.configs("gemm"):
        assert len(kit.gemm_sizes(config)) == 4
        assert dataclasses.replace(config) == config and config.arch == kit.arch()
