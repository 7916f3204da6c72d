"""What surrounds a compiler: its report, what is said meanwhile, how many run at once."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import jobs, sass
from qsync_fx.backend.cuda.kernel_build.library import Resources
from qsync_fx.errors import OptionError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that shares the machine with no other of its job, and was told nothing."""
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
    assert sass.resources(report) == Resources(
        registers=254, shared_memory=16384, stack=0, spills=0
    )
    assert sass.complaint(report) == ""
    assert sass.resources("") == Resources(0, 0, 0, 0)


def test_unusable_kernels_are_refused() -> None:
    assert (
        sass.complaint(REPORT.format(stack=0, spills=0, loads=24))
        == "it spills 24 bytes of registers to memory (it uses 254)"
    )
    assert "40 bytes of stack" in sass.complaint(REPORT.format(stack=40, spills=0, loads=0))
    serialized = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to "
        "wgmma pipeline crossing function boundary at a function call in the function 'kernel'\n"
    )
    assert "(C7510)" in sass.complaint(serialized + REPORT.format(stack=0, spills=0, loads=0))
    assert sass.complaint("ptxas info    : 0 bytes gmem\n") == "it contains no kernel"


# What is said meanwhile.


# What is said meanwhile.


def test_progress_is_printed_after_a_second_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with jobs.watch(2, True) as tell:
        tell(0, ["one"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(jobs, "_PATIENCE", 0.0)

    def said(wanted: bool = True) -> str:
        with jobs.watch(2, wanted) as tell:
            for step in ((0, ["one"]), (0, ["one"]), (1, ["two"]), (2, [])):
                tell(*step)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert [line.split(": ")[-1] for line in said().splitlines()] == [
        "0 of 2 after 0 s, now one",
        "1 of 2 after 0 s, now two",
        "2 of 2 after 0 s",
    ]
    assert said(wanted=False) == ""
    monkeypatch.setenv("RANK", "3")
    assert said() == ""


def test_a_bar_on_a_terminal() -> None:
    code = """
import time
from qsync_fx.backend.cuda.kernel_build import jobs
jobs._PATIENCE = 0.0
with jobs.watch(2, True) as tell:
    tell(0, ["gemm_[bold]one"])
    time.sleep(0.3)
    tell(2, [])
"""
    ours, theirs = pty.openpty()
    environment = dict(os.environ) | {"TERM": "xterm", "COLUMNS": "150"}
    environment.pop("RANK", None)
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, env=environment
    ) as process:
        os.close(theirs)
        said = b""
        # A pseudo-terminal whose other end is closed ends with an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                said += part
        assert process.stdout is not None
        assert process.stdout.read() == b""
    os.close(ours)
    assert process.returncode == 0
    assert b"compiling CUDA kernels" in said
    assert b"gemm_[bold]one" in said, "a name is no markup"


# How many compilers at once.


# How many compilers at once.


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = jobs.jobs()
    assert alone >= 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert jobs.jobs() == 1
    monkeypatch.setenv("QSYNC_BUILD_JOBS", "7")
    assert jobs.jobs() == 7
    assert jobs.jobs(3) == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1e3", " 3", "99999"])
def test_jobs_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_BUILD_JOBS", text)
    with pytest.raises(OptionError, match="QSYNC_BUILD_JOBS"):
        jobs.jobs()


def test_memory_is_the_least_of_all_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 64 kB\nMemAvailable:   16000000 kB\n",
        "/proc/self/cgroup": "0::/jobs/one\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/jobs/memory.max": "8000000000\n",
        "/sys/fs/cgroup/jobs/memory.current": "3000000000\n",
        "/sys/fs/cgroup/jobs/memory.stat": "anon 5\ninactive_file 1000000000\n",
    }
    monkeypatch.setattr(jobs, "_text", lambda path: files.get(str(path), ""))
    assert jobs.available_memory() == 6_000_000_000
    del files["/sys/fs/cgroup/jobs/memory.max"]
    assert jobs.available_memory() == 16_384_000_000
    files.clear()
    assert jobs.available_memory() >= jobs.need(
        TranslationUnit("u", "sm_80", "", "gemm", heavy=True)
    )
