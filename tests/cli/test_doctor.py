"""`qsync doctor`: reported hardware, formats and tools, also with a sample cpuinfo and stubs."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from qsync_fx import _C
from qsync_fx.cli import doctor_report as home
from qsync_fx.devices import support
from qsync_fx.devices.cpu_features import cpu
from qsync_fx.formats import FORMATS

XEON = """
processor\t: {0}
model name\t: Intel(R) Xeon(R) Platinum 8488C
physical id\t: 0
core id\t\t: {1}
flags\t\t: fpu sse2 avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8
"""


def shown(table: Table, width: int = 400) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def machine_row(name: str) -> str:
    """Return the table row of a tool, without the tool's name."""
    lines = shown(home.machine_table()).splitlines()
    return next(line for line in lines if line.startswith(f"{name} ")).removeprefix(name).strip()


def test_every_format_on_every_device() -> None:
    devices = [
        torch.device("cpu"),
        *(torch.device("cuda", index) for index in range(torch.cuda.device_count())),
    ]
    lines = shown(home.formats_table()).splitlines()[1:]
    for device, (name, fmt) in itertools.product(devices, FORMATS.items()):
        result = support(device, fmt)
        words = [name, str(device), result.kind, result.runs_as.name]
        assert any(line.split()[:4] == words and result.reason in line for line in lines), words
    assert len(lines) == len(devices) * len(FORMATS)
    text = shown(home.machine_table())
    assert f"of bfloat16 by {_C.gemm_instructions()['bfloat16']}" in text
    assert torch.__version__ in text and machine_row("quantizer").startswith(f"{_C.isa()} (of ")


def test_reads_the_processor() -> None:
    # Two cores with two threads each.
    local = cpu("\n".join(XEON.format(thread, thread % 2) for thread in range(4)))
    assert local.model == "Intel(R) Xeon(R) Platinum 8488C"
    assert local.features == ("avx2", "avx512", "vnni", "bf16", "amx")
    assert local.cores == 2
    assert cpu(XEON.format(0, 0).replace("avx512bw", "").replace("512_vnni", "_vnni")).features == (
        "avx2",
        "vnni",
        "bf16",
        "amx",
    )


@pytest.mark.parametrize(
    "text",
    ["", "\n\n\n", "no colon here", "flags", "flags: ", "core id: 3", "model name:\x00\ufffd"],
)
def test_an_odd_cpuinfo_is_no_error(text: str) -> None:
    local = cpu(text)
    assert local.features == ()
    assert local.cores is None
    assert local.threads >= 1


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="torch's answer is compared with Linux's /proc/cpuinfo",
)
def test_agrees_with_torch_and_the_kernels() -> None:
    assert ("avx2" in cpu().features) == ("avx2" in _C.available_isas())
    assert ("avx512" in cpu().features) == ("avx512" in _C.available_isas())


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nvcc_is_located_as_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(
        tmp_path / "cuda home/bin/nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.86'"
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda home"))
    assert machine_row("nvcc") == f"12.9.86 in {tmp_path}/cuda home/bin/nvcc"


def test_broken_nvcc_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "nvcc", "exit 3")
    monkeypatch.setenv("QSYNC_NVCC", str(tmp_path / "nvcc"))
    text = shown(home.machine_table())
    assert f"QSYNC_NVCC={tmp_path}/nvcc" in text
    assert "host compiler" not in text, "the suitable host compiler depends on nvcc"


def test_cutlass_headers_are_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    (include / "cutlass").mkdir(parents=True)
    (tmp_path / "tools/util/include").mkdir(parents=True)
    (include / "cutlass/version.h").write_text(
        "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    )
    monkeypatch.setenv("QSYNC_CUTLASS_PATH", str(tmp_path))
    assert machine_row("CUTLASS") == f"4.2.0 in {include}"


def test_counts_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("QSYNC_KERNELS_PATH", raising=False)
    assert machine_row("CUDA kernels") == f"0 compiled in {tmp_path}/kernels"
    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(tmp_path / "missing"))
    assert "does not exist" in shown(home.machine_table())


def test_report_escapes_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "[red]" / "[bold]nvcc[/]"
    executable(nvcc, "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    monkeypatch.setenv("QSYNC_NVCC", str(nvcc))
    assert machine_row("nvcc") == f"13.0.88 in {nvcc}"


def test_invalid_cpu_isa_is_reported_last_and_sets_the_exit_status() -> None:
    environment = os.environ | {
        "QSYNC_CPU_ISA": "quantum",
        "COLUMNS": "400",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "qsync_fx.cli", "doctor"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "no path 'quantum'" in done.stderr and "QSYNC_CPU_ISA" in done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("int8 "))
    assert "QSYNC_CPU_ISA is invalid" in row and "native" not in row.replace("native module", "")
    assert "threads for this process, kernels use 1" in done.stdout, (
        "kernels use OMP_NUM_THREADS threads"
    )
