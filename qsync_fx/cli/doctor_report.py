"""Report of `qsync doctor`: hardware and tools, and how each format runs here.

Invariant: a report changes no state. Unknown values are empty, not guessed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import qsync_fx.backend.cuda.runtime.device_state  # noqa: F401  registers kernels
from qsync_fx import _C, __version__
from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache
from qsync_fx.cli import output
from qsync_fx.devices.cpu_features import Cpu, cpu, wrong_path
from qsync_fx.devices.format_support import Support, support
from qsync_fx.devices.machine import HugePages, huge_pages
from qsync_fx.errors import QSyncError
from qsync_fx.formats import FORMATS, Precision

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class Quantizer:
    """ISA variant of the native quantizer; `path` is None if QSYNC_CPU_ISA is invalid (`wrong`)."""

    path: str | None
    wrong: QSyncError | None


@dataclass(frozen=True)
class Gpu:
    """CUDA device; `memory` in bytes."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Tool:
    """Tool or headers for the compilation of CUDA kernels, and their path."""

    version: str
    path: Path


@dataclass(frozen=True)
class Kernels:
    """Number of compiled CUDA kernels in a folder; `reason` is why the folder is not used."""

    folder: Path
    count: int
    reason: str = ""


@dataclass(frozen=True)
class FormatSupport:
    """Support of one format on one device."""

    device: torch.device
    precision: Precision
    support: Support


@dataclass(frozen=True)
class Report:
    """Content of `qsync doctor`.

    Attributes:
        cuda: CUDA version that torch was built for; None for a CPU build.
        nvcc, host, cutlass: tools for CUDA kernels, or the error that prevents their use.
        disassembler: tool that checks the instructions of compiled kernels; None without one.
        kernels: compiled kernels in the cache, then in the folders of QSYNC_KERNELS_PATH.
    """

    torch: str
    cuda: str | None
    cpu: Cpu
    huge_pages: HugePages
    quantizer: Quantizer
    gpus: tuple[Gpu, ...]
    nvcc: Tool | QSyncError
    host: Tool | QSyncError
    cutlass: Tool | QSyncError
    disassembler: Path | None
    kernels: tuple[Kernels, ...]
    formats: tuple[FormatSupport, ...]


def look() -> Report:
    """Return the report on this machine; runs in less than a second."""
    gpus, wrong = _gpus(), wrong_path()
    devices = (torch.device("cpu"), *(gpu.device for gpu in gpus))
    return Report(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cpu=cpu(),
        huge_pages=huge_pages(),
        quantizer=Quantizer(_C.isa() if wrong is None else None, wrong),
        gpus=gpus,
        nvcc=_tool(toolchain.nvcc),
        host=_tool(lambda: toolchain.host_compiler(toolchain.nvcc())),
        cutlass=_tool(toolchain.cutlass),
        disassembler=compiler.disassembler(),
        kernels=_kernels(),
        formats=tuple(
            FormatSupport(device, fmt, support(device, fmt))
            for device in devices
            for fmt in FORMATS.values()
        ),
    )


def _gpus() -> tuple[Gpu, ...]:
    result = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        result.append(
            Gpu(torch.device("cuda", index), properties.name, capability, properties.total_memory)
        )
    return tuple(result)


def _tool(find: Callable[[], toolchain.ToolProgram | toolchain.Headers]) -> Tool | QSyncError:
    try:
        result = find()
    except QSyncError as error:
        return error
    path = result.path if isinstance(result, toolchain.ToolProgram) else result.folders[0]
    return Tool(toolchain.dotted(result.version), path)


def _kernels() -> tuple[Kernels, ...]:
    folders, unusable = [kernel_cache.root()], []
    try:
        folders += kernel_cache.ahead_of_time()
    except QSyncError as error:
        unusable = [Kernels(Path(), 0, str(error))]
    result = []
    for folder in folders:
        entries = kernel_cache.entries(folder)
        usable = [
            entry
            for entry in entries
            if isinstance(entry, kernel_cache.CacheEntry) and not entry.manifest.refused
        ]
        result.append(Kernels(folder, len(usable)))
    return (*result, *unusable)


def render(report: Report) -> RenderableType:
    """Return the report for a `rich.console.Console`: the machine, then formats by device."""
    from rich.console import Group

    return Group(_machine(report), "", _formats(report))


def _machine(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid("", padding=(0, 2))
    table.columns[0].style, table.columns[0].no_wrap = "bold", True

    def line(name: str, value: str) -> None:
        # Device names and paths may contain rich markup characters.
        table.add_row(name, Text(value))

    cores = f"{report.cpu.cores} cores, " if report.cpu.cores else ""
    build = f"CUDA {report.cuda}" if report.cuda else "CPU only"
    line("qsync_fx", __version__)
    line("torch", f"{report.torch}, {build}, Python {platform.python_version()}")
    used = f"{report.cpu.threads} threads for this process, kernels use {torch.get_num_threads()}"
    line("processor", f"{report.cpu.model or 'unknown'}, {cores}{used}")
    line("instruction sets", ", ".join(report.cpu.features) or "none that qsync_fx uses")
    if report.huge_pages.policy:
        line("huge pages", str(report.huge_pages))
    line("quantizer", _quantizer_text(report.quantizer))
    for gpu in report.gpus:
        capability = "{}.{}".format(*gpu.capability)
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        line(str(gpu.device), f"{gpu.name}, compute capability {capability}, {memory}")
    if not report.gpus:
        line("cuda", "no device")
    line("nvcc", _tool_text(report.nvcc))
    if not isinstance(report.nvcc, QSyncError):
        line("host compiler", _tool_text(report.host))
        missing = "no cuobjdump and nvdisasm: instructions of kernels are not checked"
        line("disassembler", str(report.disassembler or missing))
    line("CUTLASS", _tool_text(report.cutlass))
    for kernels in report.kernels:
        line("CUDA kernels", kernels.reason or f"{kernels.count} compiled in {kernels.folder}")
    return table


def _quantizer_text(quantizer: Quantizer) -> str:
    if quantizer.wrong is not None:
        return str(quantizer.wrong)
    threads = "with threads" if _C.openmp else "built without OpenMP: one thread"
    wrong = "".join(
        f"; {path} computes wrong results on this processor and is not used"
        for path in _C.refused_isas()
    )
    instructions = _C.gemm_instructions().items()
    products = ", of ".join(f"{values} by {name}" for values, name in instructions)
    available = ", ".join(_C.available_isas())
    return f"{quantizer.path} (of {available}), {threads}; products of {products}{wrong}"


def _tool_text(tool: Tool | QSyncError) -> str:
    return str(tool) if isinstance(tool, QSyncError) else f"{tool.version} in {tool.path}"


def _formats(report: Report) -> Table:
    from rich.text import Text

    styles = {"native": "green", "simulated": "yellow", "substituted": "magenta"}
    rows = []
    for row in report.formats:
        result = row.support
        support_text = Text(result.how, styles[result.how])
        rows.append(
            (row.precision.name, str(row.device), support_text, result.runs_as.name, result.reason)
        )
    return output.table(("precision", "device", "how", "runs as", "why"), rows)
