"""Reports of the kernel compiler, and the limit of concurrent compilers."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler
from qsync_fx.backend.cuda.kernel_build.library import Resources
from qsync_fx.errors import OptionError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that change the limit of compilers."""
    for name in ("QSYNC_BUILD_JOBS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7cutlass6KernelI1AEEvNT_6ParamsE' for 'sm_80'
ptxas info    : Function properties for _ZN7cutlass6KernelI1AEEvNT_6ParamsE
    {stack} bytes stack frame, {spills} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers, 16384+16 bytes smem, 896 bytes cmem[0]
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 364 bytes cmem[0]
"""


def test_resources_are_the_maximum_over_kernels() -> None:
    report = REPORT.format(stack=0, spills=0, loads=0)
    assert compiler.resources(report) == Resources(
        registers=254, shared_memory=16384, stack=0, spills=0
    )
    assert compiler.complaint(report) == ""
    assert compiler.resources("") == Resources(0, 0, 0, 0)


def test_unusable_kernels_are_refused() -> None:
    assert (
        compiler.complaint(REPORT.format(stack=0, spills=0, loads=24))
        == "it spills 24 bytes of registers to memory (it uses 254)"
    )
    assert "40 bytes of stack" in compiler.complaint(REPORT.format(stack=40, spills=0, loads=0))
    serialized = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to "
        "wgmma pipeline crossing function boundary at a function call in the function 'kernel'\n"
    )
    assert "(C7510)" in compiler.complaint(serialized + REPORT.format(stack=0, spills=0, loads=0))
    assert compiler.complaint("ptxas info    : 0 bytes gmem\n") == "it contains no kernel"


# Limit of concurrent compilers.


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    default = compiler.job_limit()
    assert default >= 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert compiler.job_limit() == 1
    monkeypatch.setenv("QSYNC_BUILD_JOBS", "7")
    assert compiler.job_limit() == 7
    assert compiler.job_limit(3) == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1e3", " 3", "99999"])
def test_jobs_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_BUILD_JOBS", text)
    with pytest.raises(OptionError, match="QSYNC_BUILD_JOBS"):
        compiler.job_limit()


def test_memory_is_the_least_of_all_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 64 kB\nMemAvailable:   16000000 kB\n",
        "/proc/self/cgroup": "0::/jobs/one\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/jobs/memory.max": "8000000000\n",
        "/sys/fs/cgroup/jobs/memory.current": "3000000000\n",
        "/sys/fs/cgroup/jobs/memory.stat": "anon 5\ninactive_file 1000000000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files.get(str(path), ""))
    assert compiler.available_memory() == 6_000_000_000
    del files["/sys/fs/cgroup/jobs/memory.max"]
    assert compiler.available_memory() == 16_384_000_000
    files.clear()
    assert compiler.available_memory() >= compiler.peak_bytes(
        TranslationUnit("u", "sm_80", "", "gemm", heavy=True)
    )
