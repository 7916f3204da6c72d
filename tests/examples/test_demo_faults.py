"""Failures of the demo: invalid arguments and plans, and killed or interrupted processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsync_fx import ClusterPlan, Plan
from tests.support import tiers
from tests.support.processes import forks
from tests.support.processes.demo_runs import DIGITS, EAGER, EXAMPLES, run, wide
from tests.support.processes.ranks import ENVIRONMENT


@tiers.EVERY
def test_a_plan_for_another_model_ends_both_ranks_and_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "other.json"
    Plan("int8", operators={"stage9.conv1/conv2d": "fp32"}).save(plan)
    finished = run(*DIGITS, *EAGER, "--plan", str(plan), output=tmp_path / "out")
    assert finished.returncode == 1
    assert "rank 1 failed" in finished.stderr and "stage9.conv1/conv2d" in finished.stderr
    assert str(plan) in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--plan", "cut.json"),
        *(
            pytest.param(*case, marks=tiers.ALL)
            for case in (("--batch", "5000"), ("--output", "a file/out"))
        ),
        *(
            pytest.param(*case, marks=tiers.EVERY)
            for case in (("--data", "nowhere"), ("--inner-backend", "eager"))
        ),
    ],
)
def test_invalid_arguments_are_reported_before_a_process_starts(
    option: str, value: str, tmp_path: Path
) -> None:
    (tmp_path / "cut.json").write_text('{"format": "qsync')
    (tmp_path / "a file").write_text("")
    argument = value if option in ("--batch", "--inner-backend") else str(tmp_path / value)
    arguments, log = (
        [*DIGITS, "--output", str(tmp_path / "out"), option, argument],
        tmp_path / "log",
    )
    assert forks.run(EXAMPLES / "demo.py", arguments, {**wide(), **ENVIRONMENT}, log, tmp_path) == 2
    log_text = log.read_text()
    assert (option if argument == value else argument) in log_text
    assert "do:" in log_text and "Traceback" not in log_text
    assert not list(tmp_path.glob("out/*.log"))


def test_missing_package_names_the_setup_command(tmp_path: Path) -> None:
    finished = run(*DIGITS, output=tmp_path, python=("-S",))
    assert (
        finished.returncode == 2
        and "make setup" in finished.stderr
        and "Traceback" not in finished.stderr
    )


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a demo that trains its smaller network for long, under a plan of both ranks."""
    ClusterPlan({"training": Plan.uniform("fp32"), "inference": Plan.uniform("int8")}).save(
        tmp_path / "given.json"
    )
    arguments = ("--quick", *EAGER, "--plan", str(tmp_path / "given.json"), "--epochs", "5000")
    with started(*arguments, output=tmp_path) as process:
        yield process


@contextlib.contextmanager
def started(*arguments: str, output: Path) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        *DIGITS,
        *arguments,
        "--output",
        str(output),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=wide()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of both ranks, in order."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        children = [
            int(pid)
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        ranks = [pid for pid in children if b"rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(ranks) == 2:
            return sorted(ranks)
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def gone(pids: list[int]) -> bool:
    return not any(map(runs, pids))


def soon_gone(pids: list[int]) -> bool:
    """Return whether processes end within a minute, as a rank may outlive its launcher while Python
    exits.
    """
    deadline = time.monotonic() + 60
    while not gone(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return gone(pids)


def runs(pid: int) -> bool:
    """Return whether a process runs.

    A process that has ended stays in /proc until its status is read, which init may delay.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks in /proc")


@tiers.ALL
@linux
def test_a_rank_that_is_killed_in_training_ends_the_run(running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    while "epoch" not in running.stdout.readline():
        assert running.poll() is None
    ranks = ranks_of(running)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 1
    assert "rank 1 failed" in errors and "SIGKILL" in errors
    assert gone(ranks)


@tiers.ALL
@linux
def test_ctrl_c_ends_both_ranks_also_while_they_measure(tmp_path: Path) -> None:
    with started(output=tmp_path) as process:
        ranks = ranks_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
        assert soon_gone(ranks)


@tiers.EVERY
@linux
def test_a_rank_that_is_killed_while_it_measures_ends_the_run(tmp_path: Path) -> None:
    with started(output=tmp_path) as process:
        ranks = ranks_of(process)
        while b"profiler_start" not in (tmp_path / "rank1.log").read_bytes():
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 1 and "rank 1 failed" in errors and "SIGKILL" in errors
        assert gone(ranks)


@tiers.ALL
@linux
def test_ranks_end_when_their_launcher_is_killed(running: subprocess.Popen[str]) -> None:
    ranks = ranks_of(running)
    running.kill()
    running.wait()
    assert soon_gone(ranks)
