"""Full and closed standard output of the command line, and `OSError` of user code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.command_line import run

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("arguments", ["--version", "doctor"])
def test_full_standard_output_is_an_error(arguments: str, folder: Path) -> None:
    command = [sys.executable, "-m", "qsync_fx.cli", arguments]
    # argparse ignores errors of unbuffered writes.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=buffered,
            check=False,
        )
    assert result.returncode and "No space left on device" in result.stderr


def test_os_error_of_user_code_is_not_caught(folder: Path) -> None:
    """`FileNotFoundError` is an `OSError`, but not of standard output."""
    (folder / "reads_a_file.py").write_text("open('missing.csv')\n")
    with pytest.raises(FileNotFoundError) as caught:
        run("inspect", "reads_a_file:small")
    assert caught.value.errno == errno.ENOENT


def test_a_closed_pipe_ends_help_as_it_ends_results(folder: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "qsync_fx.cli", "--help"]
    # argparse ignores errors of unbuffered writes.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        result = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, cwd=folder, env=buffered, check=False
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")
