"""`qsync doctor`: what this machine offers, and how each format would run on it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qsync_fx.cli import output
from qsync_fx.cli.command import Command
from qsync_fx.errors import QSyncError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from qsync_fx.cli import machine

_ABOUT = "Says what this machine offers (torch, CPU, CUDA, compilers, CUTLASS) and how each precision runs on it."


def _doctor(arguments: argparse.Namespace) -> None:
    from qsync_fx.cli import machine

    report = machine.look()
    output.show(render(report))
    # All else is shown first: whoever looks for a mistake is to see the rest.
    if report.quantizer.wrong is not None:
        raise report.quantizer.wrong


def render(report: machine.Report) -> RenderableType:
    """Returns the report as something that a `rich.console.Console` prints: what there is, then formats by device."""
    from rich.console import Group

    return Group(_machine(report), "", _formats(report))


def _machine(report: machine.Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def line(name: str, value: str) -> None:
        # Names of devices and paths are data: nothing in them is markup.
        table.add_row(name, Text(value))

    cores = f"{report.cpu.cores} cores, " if report.cpu.cores else ""
    line("qsync_fx", report.qsync_fx)
    line("torch", f"{report.torch}, {f'CUDA {report.cuda}' if report.cuda else 'CPU only'}, Python {report.python}")
    threads = f"{report.cpu.threads} threads for this process, kernels use {report.threads}"
    line("processor", f"{report.cpu.model or 'unknown'}, {cores}{threads}")
    line("instruction sets", ", ".join(report.cpu.features) or "none that matter here")
    if report.huge_pages.policy:
        line("huge pages", str(report.huge_pages))
    line("quantizer", _quantizer_text(report.quantizer))
    for gpu in report.gpus:
        major, minor = gpu.capability
        line(str(gpu.device), f"{gpu.name}, compute capability {major}.{minor}, {gpu.memory / 2**30:.1f} GiB")
    if not report.gpus:
        line("cuda", "no device")
    line("nvcc", _tool_text(report.nvcc))
    if not isinstance(report.nvcc, QSyncError):
        line("host compiler", _tool_text(report.host))
        line(
            "disassembler",
            str(report.disassembler or "no cuobjdump and nvdisasm: kernels are used without a look inside"),
        )
    line("CUTLASS", _tool_text(report.cutlass))
    line(
        "for V100", f"nothing: {report.nvrtc.do}" if isinstance(report.nvrtc, QSyncError) else _tool_text(report.nvrtc)
    )
    for kernels in report.kernels:
        line("CUDA kernels", kernels.reason or f"{kernels.count} compiled in {kernels.folder}")
    return table


def _quantizer_text(quantizer: machine.Quantizer) -> str:
    if quantizer.wrong is not None:
        return str(quantizer.wrong)
    threads = "with threads" if quantizer.openmp else "built without OpenMP: one thread"
    wrong = "".join(f"; {path} gives wrong results on this processor and is not used" for path in quantizer.refused)
    products = f"products of {', of '.join(quantizer.products)}"
    return f"{quantizer.path} (of {', '.join(quantizer.available)}), {threads}; {products}{wrong}"


def _tool_text(tool: machine.Tool | QSyncError) -> str:
    return str(tool) if isinstance(tool, QSyncError) else f"{tool.version} in {tool.path}"


def _formats(report: machine.Report) -> Table:
    from rich.text import Text

    styles = {"native": "green", "simulated": "yellow", "substituted": "magenta"}
    rows = []
    for row in report.formats:
        how = Text(row.support.how, styles[row.support.how])
        rows.append((row.precision.name, str(row.device), how, row.support.runs_as.name, row.support.reason))
    return output.table(("precision", "device", "how", "runs as", "why"), rows)


COMMAND = Command("what this machine offers", _doctor, about=_ABOUT)
