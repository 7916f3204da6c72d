"""Progress of long work: log lines at most every 15 seconds, and a bar on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from qsync_fx import progress as shown
from qsync_fx.formatting import roughly


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list with the time of the clock in seconds."""
    now = [100.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with shown.progress("measuring", 6) as advance:
        for part, seconds, left in (
            ("a", 10, None),
            ("b", 10, None),
            ("c", 10, 200.0),
            ("d", 4, 5.0),
            ("e", 1, 3.0),
        ):
            clock[0] += seconds
            advance(part, left)
        clock[0] += 20
        advance("[bold]f")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "qsync: measuring: 2 of 6 after 20 s (b), about 40 s left",
        "qsync: measuring: 5 of 6 after 35 s (e), about 3 s left",
        "qsync: measuring: 6 of 6 after 55 s ([bold]f)",
    ]


def test_quick_or_silent_work_shows_no_progress(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with shown.progress("measuring", 2) as advance:
        clock[0] += 1
        advance("a")
    with shown.progress("measuring", 2, False) as advance:
        clock[0] += 1000
        advance("a")
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar() -> None:
    code = """
from qsync_fx.progress import progress
with progress("measuring [m]", 3) as advance:
    advance("a")
    advance("compiled [b]", 90.0)
"""
    ours, theirs = pty.openpty()
    environment = dict(os.environ) | {"TERM": "xterm", "COLUMNS": "150"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        # Reading a pseudo-terminal whose other end is closed raises an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                output += part
    os.close(ours)
    assert process.returncode == 0
    assert (
        b"measuring [m]" in output
        and b"compiled [b], about 1.5 minutes left" in output
        and b"2/3" in output
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.01, "1 s"),
        (1.4, "1 s"),
        (42.3, "42 s"),
        (59.7, "1.0 minutes"),
        (150, "2.5 minutes"),
        (5000, "1.4 hours"),
    ],
)
def test_remaining_seconds_are_rounded(seconds: float, words: str) -> None:
    assert roughly(seconds) == words


@pytest.mark.parametrize(
    ("work", "shown_lines"),
    [
        ("pass", []),
        ("ended.wait(30)", ["qsync: loading ..."]),
        ("with progress('measuring', 2):\n        ended.wait(1)", []),
    ],
    ids=["quick", "long", "bar"],
)
def test_long_work_without_a_bar_is_named_on_a_terminal(work: str, shown_lines: list[str]) -> None:
    """The code waits for the line, so a slow machine only delays the test."""
    code = f"""
import builtins, threading
import qsync_fx.progress as module
from qsync_fx.progress import announced, progress
ended, write = threading.Event(), builtins.print
def printed(*arguments, **settings):
    write(*arguments, **settings)
    ended.set()
builtins.print = printed
module._SOON = 0.2
with announced("loading"):
    {work}
"""
    main, terminal = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stderr=terminal, check=False)
    os.close(terminal)
    text = b""
    with contextlib.suppress(OSError):
        while part := os.read(main, 4096):
            text += part
    os.close(main)
    assert done.returncode == 0
    assert [line for line in text.decode().splitlines() if line.startswith("qsync")] == shown_lines


def test_a_log_has_no_names_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    with shown.announced("loading"):
        assert not shown._waiting
    assert capsys.readouterr().err == ""
