"""Pytest plugin that fails the run if a worker process fails at its exit.

At that time its tests have passed, and pytest-xdist does not check the exit status of workers. The
plugin runs in the controller process.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections import defaultdict
from typing import Any

import pytest


class _Exits:
    """Plugin that checks the exit status of workers, and reports the test files of failed ones."""

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
        # Runs after xdist's hook, which ends the workers and kills them after a timeout.
        for name, process in self._processes.items():
            if code := process.wait():
                # Not TESTS_FAILED, after which `make test-all` runs the failed tests again.
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
                files = "\n".join(f"  {file}" for file in sorted(self._files[name]))
                message = (
                    f"worker {name} {_described(code)} when it exited; run with -p no:xdist one "
                    f"by one what it ran:\n{files}"
                )
                report = pytest.TestReport(
                    name, (name, None, name), {}, "failed", message, "teardown"
                )
                session.config.hook.pytest_runtest_logreport(report=report)


def _described(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"gave status {code}"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError):
            from xdist.workermanage import NodeManager

            # Seconds until a worker is killed; 10 are too few while compilers use all cores.
            NodeManager.EXIT_TIMEOUT = 120
        config.pluginmanager.register(_Exits())
