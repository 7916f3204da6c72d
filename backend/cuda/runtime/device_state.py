"""State of a device as far as kernels need it: architecture, available kernels, tuning table.

Invariant: the state of a device is constant for the life of the process, so a decision made while a
graph is traced is valid when the graph runs.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from qsync_fx.backend.cuda import kernel_config, toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit, unit_of
from qsync_fx.backend.cuda.kernel_build import kernel_cache, kernel_registry, library
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig, wide
from qsync_fx.backend.cuda.layer_times import LayerTimes
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.selection.candidates import candidates
from qsync_fx.backend.cuda.selection.select import Candidates, KernelDecision, decide
from qsync_fx.backend.cuda.tuning import Environment, TuningError, TuningTable, load_table, path_in
from qsync_fx.devices import format_support
from qsync_fx.devices.device_catalog import device_called, get
from qsync_fx.devices.device_model import Device
from qsync_fx.devices.format_support import Kernels, offer
from qsync_fx.environment import switch
from qsync_fx.errors import QSyncError, ToolchainError
from qsync_fx.formats import FORMATS
from qsync_fx.serialization.atomic_files import caches


@dataclass(frozen=True)
class DeviceState:
    """State of one device.

    Attributes:
        arch: compile target of the kernels; None if there are none, because of `reason`.
        compiles: whether this machine can compile quantizers and copy kernels.
        lacks: why this machine cannot compile GEMMs and convolutions; None if it can.
        multiprocessors: None if the device is not present.
        mend: remedy for `reason` or `lacks`; None if there is none.
        model: device of the catalog with its constants; a typical one of `arch` if None.
    """

    arch: Arch | None
    reason: str
    table: TuningTable | None
    compiles: bool = True
    lacks: str | None = None
    multiprocessors: int | None = None
    mend: str | None = None
    model: Device | None = None

    def layer(self, output: Problem, precision: str) -> LayerTimes | None:
        """Return measured times of a layer, from `qsync tune` or else from this package."""
        if self.arch is None:
            return None
        tables = (self.table, self.model and shipped(self.model.name))
        rows = (table.layer(output, precision, wide(self.arch)) for table in tables if table)
        return next(filter(None, rows), None)


_assumed: ContextVar[tuple[str, DeviceState] | None] = ContextVar("qsync_assumed", default=None)


@contextlib.contextmanager
def assumed(
    arch: Arch | None, table: TuningTable | None = None, on: str = "cuda"
) -> Iterator[None]:
    """Treat all devices of type `on` as devices of `arch` with kernels; without kernels if None."""
    reason = ""
    if arch is None:
        reason = "the device is assumed to have no kernels"
    with _state_of_type(on, DeviceState(arch, reason, table)):
        yield


@contextlib.contextmanager
def tuned_by(table: TuningTable, device: torch.device) -> Iterator[None]:
    """Decide for devices of the type of `device` by a table that is not saved yet."""
    with _state_of_type(device.type, replace(known_of(device), table=table)):
        yield


@contextlib.contextmanager
def _state_of_type(kind: str, state: DeviceState) -> Iterator[None]:
    token = _assumed.set((kind, state))
    format_support.forget()
    try:
        yield
    finally:
        _assumed.reset(token)
        format_support.forget()


def known_of(device: torch.device) -> DeviceState:
    """Return the state of a device; devices other than CUDA have no kernels."""
    assumption = _assumed.get()
    if assumption is not None and assumption[0] == device.type:
        return assumption[1]
    target = format_support.target_of(device)
    if target is not None:
        # A target device's tuning table exists only there, so the first suitable kernel is used.
        arch = kernel_config.target(target)
        name = format_support.target_name(device)
        model = get(name) if name else None
        return DeviceState(arch, "" if arch else _no_kernels(target), None, model=model)
    if device.type != "cuda":
        return DeviceState(None, f"{device.type} has no kernels", None)
    # A device without an index means cuda:0: the device of a tensor always has an index.
    return _state_of_index(device.index or 0)


def decision(problem: Problem, device: torch.device) -> KernelDecision:
    """Return the kernel for a problem on a device, or the decision for torch, with the reason."""
    return _decided(problem, device, kernel_registry.refusals())


def loaded_decision(problem: Problem, device: torch.device) -> KernelDecision:
    """Return the decision for a problem among the kernels that are already loaded."""
    result = known_of(device)
    if result.arch is None:
        return KernelDecision(None, problem, result.reason)
    loaded = functools.partial(_filtered, kernel_registry.loaded)
    return decide(problem, result.arch, result.table, loaded)


def stored(problem: Problem, arch: Arch) -> tuple[KernelConfig, ...]:
    """Return the candidates that serve a problem and are compiled, locally or ahead of time."""
    return _filtered(kernel_registry.stored, problem, arch)


def _filtered(
    accepts: Callable[[TranslationUnit], bool], problem: Problem, arch: Arch
) -> tuple[KernelConfig, ...]:
    return tuple(config for config in candidates(problem, arch) if accepts(unit_of(config)))


@functools.lru_cache(maxsize=4096)
def _decided(problem: Problem, device: torch.device, refusals: int) -> KernelDecision:
    result = known_of(device)
    if result.arch is None:
        return KernelDecision(None, problem, result.reason)
    if result.lacks is None:
        made = decide(problem, result.arch, result.table, usable(result.multiprocessors))
        if made.config is None:
            units = map(unit_of, candidates(problem, result.arch))
            for error in filter(None, map(kernel_registry.failure, units)):
                return replace(made, reason=error.what)
        return made
    made = decide(problem, result.arch, result.table, stored)
    if made.config is None and not stored(problem, result.arch):
        # A kernel might exist if there were a compiler: report the missing tool.
        return replace(made, reason=result.lacks)
    return made


def usable(multiprocessors: int | None) -> Candidates:
    """Return a function that lists the candidates of a problem on a device without refused kernels.

    It returns none after `MOST_REFUSED` refusals, which bounds the minutes of failed compilations.
    """

    def result(problem: Problem, arch: Arch) -> tuple[KernelConfig, ...]:
        every = candidates(problem, arch, multiprocessors)
        left = tuple(c for c in every if not kernel_registry.refused(unit_of(c)))
        return left if len(every) - len(left) < MOST_REFUSED else ()

    return result


MOST_REFUSED: Final = 3
WHEN_FORGOTTEN: Final[list[Callable[[], object]]] = []
"""Callbacks that run when cached decisions become invalid."""


def _forget_decisions() -> None:
    for clear in (_decided.cache_clear, *WHEN_FORGOTTEN):
        clear()


def forget() -> None:
    """Drop the cached states of devices, so that new tuning tables are read."""
    _state_of_index.cache_clear()
    _forget_decisions()


@functools.cache
def _state_of_index(index: int) -> DeviceState:
    if not switch("QSYNC_KERNELS"):
        return DeviceState(None, "kernels are disabled by QSYNC_KERNELS", None)
    if index >= torch.cuda.device_count():
        return DeviceState(None, f"the device cuda:{index} does not exist on this machine", None)
    capability = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", None)
    arch = kernel_config.target(capability, shared_memory)
    if arch is None:
        return DeviceState(None, _no_kernels(capability), None)
    plain, full = _missing_tool(templates=False), _missing_tool()
    if plain is not None and not _has_compiled_kernels(arch):
        return DeviceState(None, plain.what, None, compiles=False, lacks=plain.what, mend=plain.do)
    state = DeviceState(
        arch,
        "",
        _table(index),
        plain is None,
        multiprocessors=properties.multi_processor_count,
        model=device_called(str(getattr(properties, "name", "")), capability),
    )
    return state if full is None else replace(state, lacks=full.what, mend=full.do)


@functools.cache
def shipped(name: str) -> TuningTable | None:
    """Return the times of layers that this package has of a device of the catalog, if any."""
    path = _SHIPPED / f"{name}.json"
    return load_table(path) if path.exists() else None


_SHIPPED: Final = Path(__file__).parents[1] / "layer_tables"


def _no_kernels(capability: tuple[int, int]) -> str:
    return f"qsync_fx has no kernels for compute capability {'.'.join(map(str, capability))}"


def _missing_tool(templates: bool = True) -> ToolchainError | None:
    """Return why kernels cannot be compiled, those from `templates` or plain CUDA."""
    try:
        toolchain.toolchain(templates)
    except ToolchainError as error:
        return error
    return None


def _has_compiled_kernels(arch: Arch) -> bool:
    """Return whether compiled kernels for an architecture exist, local or built ahead of time."""
    with contextlib.suppress(QSyncError):
        folders = [*kernel_cache.ahead_of_time(), kernel_cache.root()]
        entries = (entry for folder in folders for entry in kernel_cache.entries(folder))
        manifests = (e.manifest for e in entries if isinstance(e, kernel_cache.CacheEntry))
        return any(manifest.arch == arch and not manifest.refused for manifest in manifests)
    return False


def folder() -> Path:
    """Return the folder of tuning tables, next to the kernel cache."""
    return caches() / "tuning"


def _table(index: int) -> TuningTable | None:
    try:
        current = environment(torch.device("cuda", index))
        return load_table(path_in(folder(), current), current)
    except TuningError:
        # A damaged table must not stop a training run; `qsync tune` reports the damage.
        return None


def environment(device: torch.device) -> Environment:
    """Return the versions and the GPU name that timings on a CUDA device depend on."""
    cutlass = ""
    with contextlib.suppress(ToolchainError):
        cutlass = toolchain.dotted(toolchain.cutlass().version)
    return Environment(
        gpu=torch.cuda.get_device_name(device),
        driver=_driver(),
        cuda=torch.version.cuda or "",
        torch=torch.__version__,
        cutlass=cutlass,
        abi=library.VERSION,
    )


def _driver() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        if result := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text):
            return result[1]
    return ""


def _kernels(device: torch.device) -> Kernels:
    result, assumption = known_of(device), _assumed.get()
    if result.arch is None:
        return Kernels(None, result.reason, capability=format_support.target_of(device))
    formats = _multiplied(result.arch)
    assumed = assumption is not None and assumption[0] == device.type
    if not assumed and format_support.target_of(device) is None:
        return Kernels(result.arch, "", formats)
    number = int(result.arch.strip("sm_a"))
    return Kernels(result.arch, "", formats, (number // 10, number % 10))


@functools.cache
def _multiplied(arch: Arch) -> frozenset[str]:
    """Return the formats that have GEMM kernels on an architecture."""
    problem = GemmProblem(4096, 4096, 4096, "fp32", "fp32", "fp32")
    names = [row.name for row in FORMATS.values() if row.bits <= 32]
    return frozenset(name for name in names if candidates(replace(problem, a=name, b=name), arch))


offer(_kernels, _forget_decisions)
