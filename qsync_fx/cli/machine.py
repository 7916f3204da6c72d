"""What this machine offers to qsync_fx, and how each format would run on it: the values behind `qsync doctor`.

Invariant: it looks and changes nothing, and what cannot be found out is left empty, never guessed. How a format runs is
`qsync_fx.devices.support`'s answer; this only asks.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import qsync_fx.backend.cuda.run.device  # noqa: F401  what `support` says of CUDA devices comes from there
from qsync_fx import _C, __version__
from qsync_fx.backend.cuda.libraries import cache, sass
from qsync_fx.backend.cuda.tools import toolchain
from qsync_fx.devices import Support, support, wrong_path
from qsync_fx.devices.huge_pages import HugePages, huge_pages
from qsync_fx.devices.processor import Cpu, cpu
from qsync_fx.errors import QSyncError
from qsync_fx.precision import FORMATS, Precision


@dataclass(frozen=True)
class Quantizer:
    """The native quantizer: the path in use, those there are, and whether it uses threads. `path` is None with `wrong` saying why.

    `refused` are paths that are there, and are not used since they give other results than the scalar one; `products` says of each
    type of values which instruction multiplies matrices of it.
    """

    path: str | None
    available: tuple[str, ...]
    openmp: bool
    wrong: QSyncError | None = None
    refused: tuple[str, ...] = ()
    products: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A CUDA device; memory in bytes."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Tool:
    """Something that CUDA kernels are compiled with, and where it lies."""

    version: str
    path: Path


@dataclass(frozen=True)
class Kernels:
    """CUDA kernels that are compiled already: how many there are in a folder. `reason` says why the folder is not used."""

    folder: Path
    count: int
    reason: str = ""


@dataclass(frozen=True)
class FormatSupport:
    """How one device runs one format."""

    device: torch.device
    precision: Precision
    support: Support


@dataclass(frozen=True)
class Report:
    """Everything that `qsync doctor` says.

    Attributes:
        cuda: what torch was built for; None for a CPU build.
        threads: that kernels on the CPU use, of those that the process may.
        nvcc, host, cutlass: what CUDA kernels are compiled with, or why it cannot be used.
        nvrtc: what compiles for sm_70 (V100), which nvcc of CUDA 13 does not, or why there is nothing.
        disassembler: what looks for the right instructions in compiled kernels; None where nothing does.
        kernels: those that are compiled already: in the cache, then in the folders of QSYNC_KERNELS_PATH.
    """

    qsync_fx: str
    torch: str
    python: str
    cuda: str | None
    cpu: Cpu
    threads: int
    huge_pages: HugePages
    quantizer: Quantizer
    gpus: tuple[Gpu, ...]
    nvcc: Tool | QSyncError
    host: Tool | QSyncError
    cutlass: Tool | QSyncError
    nvrtc: Tool | QSyncError
    disassembler: Path | None
    kernels: tuple[Kernels, ...]
    formats: tuple[FormatSupport, ...]


def look() -> Report:
    """Looks this machine over; under a second."""
    gpus = _gpus()
    devices = (torch.device("cpu"), *(gpu.device for gpu in gpus))
    return Report(
        qsync_fx=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cuda=torch.version.cuda,
        cpu=cpu(),
        threads=torch.get_num_threads(),
        huge_pages=huge_pages(),
        quantizer=_quantizer(),
        gpus=gpus,
        nvcc=_tool(toolchain.nvcc),
        host=_tool(lambda: toolchain.host_compiler(toolchain.nvcc())),
        cutlass=_tool(toolchain.cutlass),
        nvrtc=_tool(lambda: toolchain.toolchain("sm_70").nvcc),
        disassembler=sass.disassembler(),
        kernels=_kernels(),
        formats=tuple(
            FormatSupport(device, fmt, support(device, fmt)) for device in devices for fmt in FORMATS.values()
        ),
    )


def _quantizer() -> Quantizer:
    available = tuple(_C.available_isas())
    if (wrong := wrong_path()) is not None:
        return Quantizer(None, available, _C.openmp, wrong)
    products = tuple(f"{values} by {instruction}" for values, instruction in _C.gemm_instructions().items())
    return Quantizer(_C.isa(), available, _C.openmp, refused=tuple(_C.refused_isas()), products=products)


def _gpus() -> tuple[Gpu, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        found.append(Gpu(torch.device("cuda", index), properties.name, capability, properties.total_memory))
    return tuple(found)


def _tool(find: Callable[[], toolchain.Program | toolchain.Headers]) -> Tool | QSyncError:
    try:
        found = find()
    except QSyncError as error:
        return error
    path = found.path if isinstance(found, toolchain.Program) else found.folders[0]
    return Tool(toolchain.dotted(found.version), path)


def _kernels() -> tuple[Kernels, ...]:
    folders, reason = [cache.root()], ""
    try:
        folders += cache.ahead_of_time()
    except QSyncError as error:
        reason = str(error)
    found = []
    for folder in folders:
        entries = [entry for entry in cache.entries(folder) if isinstance(entry, cache.Entry)]
        found.append(Kernels(folder, sum(not entry.manifest.refused for entry in entries)))
    return (*found, *([Kernels(Path(), 0, reason)] if reason else ()))
