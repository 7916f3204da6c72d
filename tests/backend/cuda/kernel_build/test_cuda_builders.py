"""Compiler processes: locks between processes, interrupts, and the limit of concurrent compilers by
memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qsync_fx import progress
from qsync_fx.backend.cuda.kernel_build import compiler
from tests.support import tiers
from tests.support.cuda.compiled.kernel_caches import (
    entry_of,
    nothing_is_left,
    tools_or_skip,
    watched,
)
from tests.support.cuda.compiled.small_units import small_unit

pytest_plugins = ["tests.support.cuda.compiled.kernel_caches"]
tools_or_skip()


BUILDER = """\
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.support.cuda.compiled.small_units import build, small_unit
from qsync_fx.backend.cuda.kernel_build import compiler

compile_units = compiler.compile_units

def found_none(*given):
    if "WANTED" in os.environ:
        Path(os.environ["WANTED"], str(os.getpid())).touch()
    compile_units(*given)

compiler.compile_units = found_none
print(*build([small_unit("raced"), small_unit("raced_too")]).values(), sep="\\n")
"""

WAITS_FOR_TWO = "for i in $(seq 3000); do [ $(ls '{}' | wc -l) -ge 2 ] && break; sleep 0.05; done"
"""Shell command that waits for two files, with a timeout."""


def builder() -> subprocess.Popen[str]:
    code = BUILDER.format(tests=str(Path(__file__).parents[4]))
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@tiers.ALL
def test_one_of_two_processes_compiles(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compilers wait until both processes have read the cache. Otherwise the second process would
    # find the libraries of the first.
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    monkeypatch.setenv("WANTED", str(wanted))
    calls = watched(tmp_path, monkeypatch, before=WAITS_FOR_TWO.format(wanted))
    processes = [builder(), builder()]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert len(list(wanted.iterdir())) == 2, "both processes request the missing kernels"
    assert calls() == 2, "each of the two units is compiled once"
    assert nothing_is_left(home)


def test_waiting_for_another_process_is_reported_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock_results = [False] * 12
    acquired = compiler._acquired
    monkeypatch.setattr(
        compiler,
        "_acquired",
        lambda *arguments: lock_results.pop() if lock_results else acquired(*arguments),
    )
    monkeypatch.setattr(compiler, "_LONG", 0.1)
    monkeypatch.setenv("RANK", "3")
    watched(tmp_path, monkeypatch, before="exit 9")
    compiler.attempt([small_unit("raced")])
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "qsync (rank 3): has been waiting" in line and "another process that compiles raced" in line
    )
    assert "qsync kernels build" in line


def test_progress_is_printed_by_rank_0(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "_EVERY", 1.0)
    watched(tmp_path, monkeypatch, before="sleep 1.2; exit 9")

    def said(wanted: bool = True) -> str:
        compiler.attempt([small_unit("one")], progress=wanted)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    (line,) = said().splitlines()
    assert line == "qsync: compiling CUDA kernels: 0 of 1 after 1 s (one)"
    assert said(wanted=False) == ""
    monkeypatch.setenv("RANK", "3")
    assert said() == ""


def test_interrupt_leaves_no_files(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    calls = watched(tmp_path, monkeypatch, before=f"sleep 300 & echo $! >> '{pids}'; wait")
    process = builder()
    while not pids.exists() or not pids.read_text().strip():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert list((home / "kernels").glob(".build-*"))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=200)
    assert "KeyboardInterrupt" in stderr
    assert calls() >= 1
    assert nothing_is_left(home)
    # A killed process ends after a delay.
    until = time.monotonic() + 30
    while any(alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < until, "a compiler is still running after the interrupt"
        time.sleep(0.05)
    assert entry_of(home).manifest.name == "small"


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_concurrent_compilers_are_limited_by_memory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    watched(
        tmp_path,
        monkeypatch,
        before=f"echo start >> {marks}; sleep 0.3; echo end >> {marks}; exit 9",
    )

    def most_at_once(jobs: int, heavy: bool) -> int:
        marks.write_text("")
        units = [small_unit(f"unit_{number}", heavy=heavy) for number in range(4)]
        assert len(compiler.attempt(units, progress=False, jobs=jobs).failures) == 4
        steps = [1 if line == "start" else -1 for line in marks.read_text().split()]
        assert steps.count(1) == 4
        return max(sum(steps[: count + 1]) for count in range(len(steps)))

    monkeypatch.setattr(compiler, "available_memory", lambda: 10_000_000_000)
    assert most_at_once(jobs=1, heavy=False) == 1
    assert most_at_once(jobs=4, heavy=True) == 2
    assert most_at_once(jobs=3, heavy=False) == 3
    monkeypatch.setattr(compiler, "available_memory", lambda: 100)
    assert most_at_once(jobs=4, heavy=False) == 1
