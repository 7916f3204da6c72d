"""Standard streams that are full or closed: one line on standard error and a status that is
not 0.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_fx.cli import commands
from tests.support import tiers
from tests.support.processes.command_line import run

pytestmark = pytest.mark.usefixtures("folder")
FULL = "qsync: standard output cannot be written: No space left on device\n"
CLOSED = (
    "qsync: standard output is closed, so results cannot be printed: redirect it to a file or to "
    "/dev/null\n"
)
WITHOUT_TORCH = ["--help", "--version", *(f"{name} --help" for name in commands.names())]
SMALL = "models_of_test:small"


def shell(arguments: str, redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = f"'{sys.executable}' -m qsync_fx.cli {arguments} {redirection}"
    return subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=folder, check=False
    )


def run_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Run the command with a standard output that is full; return its status and standard error."""
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        status = run(*arguments)
    return status, capsys.readouterr().err


@pytest.mark.parametrize("arguments", WITHOUT_TORCH)
def test_full_standard_output_without_torch(arguments: str, folder: Path) -> None:
    result = shell(arguments, "> /dev/full", folder)
    assert (result.returncode, result.stderr) == (2, FULL)


@pytest.mark.parametrize(
    "arguments", [*WITHOUT_TORCH, f"inspect {SMALL}", f"plan {SMALL}", "doctor"]
)
def test_closed_standard_output(arguments: str, folder: Path) -> None:
    result = shell(arguments, ">&-", folder)
    assert (result.returncode, result.stderr) == (2, CLOSED)


@pytest.mark.parametrize(
    "arguments",
    [
        f"inspect {SMALL}",
        f"inspect {SMALL} --json",
        f"inspect {SMALL} --diff assign lower",
        "doctor",
        "kernels list --json",
        f"comm predict {SMALL} --gpus 4 --bandwidth 1gbit",
        f"measure {SMALL} --device t4",
        pytest.param(f"sensitivity {SMALL} --precisions bf16 --steps 1", marks=tiers.ALL),
        pytest.param(
            f"plan {SMALL} --cluster cluster.toml --objective recover --budget fp16",
            marks=tiers.ALL,
        ),
        "comm bench --megabytes 0.5 --repeats 2 --codec qsgd8",
    ],
)
def test_full_standard_output(
    arguments: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "cluster.toml").write_text(
        "[devices.t4]\ndevice = 't4'\n[network]\nbandwidth = 1e9\n"
    )
    status, messages = run_full(monkeypatch, capsys, *arguments.split())
    assert status == 2 and messages.endswith(FULL) and "Traceback" not in messages


def test_output_longer_than_the_buffer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The write itself fails then, which argparse ignores, and Python has nothing left to flush at
    exit.
    """
    monkeypatch.setattr("qsync_fx.cli.parser._EXAMPLES", "x" * 100_000)
    assert run_full(monkeypatch, capsys, "--help") == (2, FULL)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--version", 0),
        ("inspect nowhere:small", 2),
        pytest.param(f"inspect {SMALL} --json --plan-out plan.json", 0, marks=tiers.ALL),
    ],
)
def test_closed_standard_error(arguments: str, status: int, folder: Path) -> None:
    """Messages must not go to standard output, nor to a file that gets the descriptor of standard
    error.
    """
    result = shell(arguments, "> out 2>&-", folder)
    assert result.returncode == status
    assert "qsync:" not in (folder / "out").read_text()


def test_os_error_of_user_code_is_not_caught(folder: Path) -> None:
    """It is an `OSError`, too, but not of standard output."""
    (folder / "reads_a_file.py").write_text("open('missing.csv')\n")
    with pytest.raises(FileNotFoundError) as caught:
        run("inspect", "reads_a_file:small")
    assert caught.value.errno == errno.ENOENT


def test_a_closed_pipe_ends_help_as_it_ends_results(folder: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "qsync_fx.cli", "--help"]
    try:
        result = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, cwd=folder, check=False
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")
