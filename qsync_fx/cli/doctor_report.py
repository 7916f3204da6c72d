"""Tables of `qsync doctor`: hardware and tools, and how each format runs here.

Invariant: a report changes no state. Unknown values are empty, not guessed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

import qsync_fx.backend.cuda.runtime.device_state  # noqa: F401  registers kernels
from qsync_fx import _C, __version__
from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache
from qsync_fx.cli import output
from qsync_fx.devices.cpu_features import cpu, wrong_path
from qsync_fx.devices.format_support import support
from qsync_fx.devices.machine import huge_pages
from qsync_fx.errors import QSyncError
from qsync_fx.formats import FORMATS

if TYPE_CHECKING:
    from rich.table import Table


def machine_table() -> Table:
    """Return a table of versions, processor, GPUs, compilers and compiled kernels."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid("", padding=(0, 2))
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    for name, value in (*_processor(), *_gpus(), *_tools(), *_kernels()):
        # Device names and paths may contain rich markup characters.
        table.add_row(name, Text(value))
    return table


def _processor() -> Iterator[tuple[str, str]]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield "qsync_fx", __version__
    yield "torch", f"{torch.__version__}, {build}, Python {platform.python_version()}"
    local = cpu()
    cores = f"{local.cores} cores, " if local.cores else ""
    used = f"{local.threads} threads for this process, kernels use {torch.get_num_threads()}"
    yield "processor", f"{local.model or 'unknown'}, {cores}{used}"
    yield "instruction sets", ", ".join(local.features) or "none that qsync_fx uses"
    if huge_pages().policy:
        yield "huge pages", str(huge_pages())
    yield "quantizer", quantizer_text()


def quantizer_text() -> str:
    """Return the ISA variant of the native kernels, or why QSYNC_CPU_ISA is invalid."""
    if (wrong := wrong_path()) is not None:
        return str(wrong)
    threads = "with threads" if _C.openmp else "built without OpenMP: one thread"
    refused = "".join(
        f"; {path} computes wrong results on this processor and is not used"
        for path in _C.refused_isas()
    )
    instructions = _C.gemm_instructions().items()
    products = ", of ".join(f"{values} by {name}" for values, name in instructions)
    available = ", ".join(_C.available_isas())
    return f"{_C.isa()} (of {available}), {threads}; products of {products}{refused}"


def _gpus() -> Iterator[tuple[str, str]]:
    count = torch.cuda.device_count()
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f} GiB"
        yield f"cuda:{index}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}"
    if not count:
        yield "cuda", "no device"


def _tools() -> Iterator[tuple[str, str]]:
    yield "nvcc", _tool(toolchain.nvcc)
    try:
        nvcc = toolchain.nvcc()
    except QSyncError:
        pass  # the suitable host compiler depends on nvcc
    else:
        yield "host compiler", _tool(lambda: toolchain.host_compiler(nvcc))
        missing = "no cuobjdump and nvdisasm: instructions of kernels are not checked"
        yield "disassembler", str(compiler.disassembler() or missing)
    yield "CUTLASS", _tool(toolchain.cutlass)


def _tool(find: Callable[[], toolchain.ToolProgram | toolchain.Headers]) -> str:
    """Return version and path of a tool or of headers, or the error that prevents their use."""
    try:
        result = find()
    except QSyncError as error:
        return str(error)
    path = result.path if isinstance(result, toolchain.ToolProgram) else result.folders[0]
    return f"{toolchain.dotted(result.version)} in {path}"


def _kernels() -> Iterator[tuple[str, str]]:
    folders, unusable = [kernel_cache.root()], ""
    try:
        folders += kernel_cache.ahead_of_time()
    except QSyncError as error:
        unusable = str(error)
    for folder in folders:
        usable = [
            entry
            for entry in kernel_cache.entries(folder)
            if isinstance(entry, kernel_cache.CacheEntry) and not entry.manifest.refused
        ]
        yield "CUDA kernels", f"{len(usable)} compiled in {folder}"
    if unusable:
        yield "CUDA kernels", unusable


def formats_table() -> Table:
    """Return a table of the formats on each device of this machine."""
    from rich.text import Text

    styles = {"native": "green", "simulated": "yellow", "substituted": "magenta"}
    gpus = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    rows = []
    for device in (torch.device("cpu"), *gpus):
        for fmt in FORMATS.values():
            result = support(device, fmt)
            support_text = Text(result.kind, styles[result.kind])
            rows.append((fmt.name, str(device), support_text, result.runs_as.name, result.reason))
    return output.table(("precision", "device", "how", "runs as", "why"), rows)
