"""Runs of the demo in a new process on scikit-learn's digits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from qsync_fx import Plan

EXAMPLES = Path(__file__).parents[3] / "examples"
DIGITS = ("--data", "digits")
INT8 = Plan("int8", patterns=[("stem", "fp32"), ("**.shortcut", "bf16"), ("head", "fp32")])
EAGER = ("--inner-backend", "aot_eager")
"""Options with which Inductor compiles no kernel."""


def run(
    *arguments: str, output: Path, python: tuple[str, ...] = (), seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        *python,
        str(EXAMPLES / "demo.py"),
        *arguments,
        "--output",
        str(output),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=wide())


def wide() -> dict[str, str]:
    """Return an environment in which rich does not wrap lines."""
    return {**os.environ, "COLUMNS": "300"}
