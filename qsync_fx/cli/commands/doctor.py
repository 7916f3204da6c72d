"""`qsync doctor`: hardware and tools of this machine, and how each format runs on it."""

from __future__ import annotations

import argparse

from qsync_fx.cli import output
from qsync_fx.cli.command import Command

_ABOUT = """\
Shows torch, CPU, CUDA, compilers and CUTLASS of this machine, and how each
precision runs on it."""


def _doctor(arguments: argparse.Namespace) -> None:
    from rich.console import Group

    from qsync_fx.cli.doctor_report import formats_table, machine_table
    from qsync_fx.devices.cpu_features import wrong_path

    output.show(Group(machine_table(), "", formats_table()))
    # The rest of the report helps to find the mistake, so it is shown first.
    if (wrong := wrong_path()) is not None:
        raise wrong


COMMAND = Command("show hardware, tools and formats of this machine", _doctor, about=_ABOUT)
