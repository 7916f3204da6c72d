"""`qsync doctor`: hardware and tools of this machine, and how each format runs on it."""

from __future__ import annotations

import argparse

from qsync_fx.cli import output
from qsync_fx.cli.command import Command

_ABOUT = """\
Shows torch, CPU, CUDA, compilers and CUTLASS of this machine, and how each
precision runs on it."""


def _doctor(arguments: argparse.Namespace) -> None:
    from qsync_fx.cli import doctor_report

    report = doctor_report.look()
    output.show(doctor_report.render(report))
    # The rest of the report helps to find the mistake, so it is shown first.
    if report.quantizer.wrong is not None:
        raise report.quantizer.wrong


COMMAND = Command("show hardware, tools and formats of this machine", _doctor, about=_ABOUT)
