"""A worker that dies while it exits fails the run. Its tests have passed by then, and pytest-xdist
asks no worker how it ended.

A plugin of pytest, for the process that hands out tests.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections import defaultdict
from typing import Any

import pytest


class _Exits:
    """How the workers of one run end, and which files each has run."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._files: defaultdict[str, set[str]] = defaultdict(set)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        self._processes[gateway.id] = gateway._io.popen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if node := getattr(report, "node", None):
            self._files[node.gateway.id].add(report.location[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # After xdist's own, which has ended them, by force where they took too long.
        for name, process in self._processes.items():
            if code := process.wait():
                # Not that of tests which failed, and may run again: none has.
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
                files = "\n".join(f"  {file}" for file in sorted(self._files[name]))
                what = (
                    f"worker {name} {_described(code)} when it exited; run with -p no:xdist one "
                    f"by one what it ran:\n{files}"
                )
                report = pytest.TestReport(name, (name, None, name), {}, "failed", what, "teardown")
                session.config.hook.pytest_runtest_logreport(report=report)


def _described(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"gave status {code}"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError):
            from xdist.workermanage import NodeManager

            # A worker that has not ended after so many seconds is killed, and ten are few where
            # compilers keep the machine busy.
            NodeManager.EXIT_TIMEOUT = 120
        config.pluginmanager.register(_Exits())
