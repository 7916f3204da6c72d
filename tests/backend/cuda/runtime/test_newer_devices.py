"""Machines without nvcc or CUTLASS, and devices newer than the tables: available kernels and
warnings.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qsync_fx.backend.cuda import codegen, kernel_config, toolchain
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache, kernel_registry
from qsync_fx.backend.cuda.kernel_build.kernel_cache import included
from qsync_fx.backend.cuda.runtime import device_state as devices, quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import DeviceState, decision, forget
from qsync_fx.backend.cuda.toolchain import Headers, Toolchain, ToolProgram
from qsync_fx.errors import PlanWarning, ToolchainError
from qsync_fx.formats import FORMATS
from tests.support.cuda.large_products import INT8

CUDA = torch.device("cuda", 0)
NO_NVCC = ToolchainError("no nvcc of 12.4 or later", do="install the CUDA toolkit")
NO_CUTLASS = ToolchainError(
    "the CUTLASS headers were not found", do="pip install --no-deps nvidia-cutlass==4.2.0.0"
)


@pytest.mark.parametrize(
    ("capability", "shared", "arch"),
    [
        ((7, 0), None, None), ((7, 2), None, None), ((6, 1), None, None), ((9, 0), None, "sm_90a"),
        ((10, 0), 227 << 10, "sm_80"), ((10, 3), None, "sm_80"), ((12, 0), 99 << 10, "sm_89"),
        ((12, 1), None, "sm_89"),
        ((13, 0), 228 << 10, "sm_80"), ((13, 0), 99 << 10, "sm_89"),
    ],
)  # fmt: skip
def test_every_capability_has_a_compiler(
    capability: tuple[int, int], shared: int | None, arch: str | None
) -> None:
    assert kernel_config.target(capability, shared) == arch


def test_kernels_for_newer_devices_contain_ptx() -> None:
    tools = Toolchain(ToolProgram(__file__, (12, 4)), ToolProgram("g++", (12,)), Headers())  # type: ignore[arg-type]

    def target(arch: Any) -> str:
        return next(
            word
            for word in compiler.command(codegen.quantizer(arch, "fp32", "int8"), tools)
            if "-gencode" in word
        )

    patched = pytest.MonkeyPatch()
    patched.setattr(compiler, "library_folders", lambda path: ())
    try:
        assert target("sm_80") == "-gencode=arch=compute_80,code=[sm_80,compute_80]"
        assert target("sm_89") == "-gencode=arch=compute_89,code=[sm_89,compute_89]"
        assert target("sm_75") == "-gencode=arch=compute_75,code=sm_75"
    finally:
        patched.undo()


@pytest.mark.parametrize(
    "unit",
    [
        codegen.quantizer("sm_80", "fp32", "int8"),
        codegen.copier("sm_80"),
        *codegen.converters("sm_75"),
    ],
)
def test_quantizers_and_copies_need_no_cutlass(unit: Any) -> None:
    assert not unit.templates
    for name in included(unit.source):
        text = (kernel_cache.TEMPLATES / name).read_text()
        assert "cutlass/" not in text and "cute/" not in text, name


class Machine:
    """Simulated GPU, with or without compiler and CUTLASS."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        capability: tuple[int, int] = (8, 0),
        shared: int = 163 << 10,
    ) -> None:
        self.patch = patch
        properties = SimpleNamespace(multi_processor_count=40, shared_memory_per_block_optin=shared)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        patch.setattr(devices, "_table", lambda index: None)
        patch.setattr(devices, "_has_compiled_kernels", lambda arch: False)
        patch.delenv("QSYNC_KERNELS", raising=False)
        warned: set[str] = set()
        patch.setattr(quantize_launch, "_warned", warned)

    def has(self, nvcc: bool, cutlass: bool) -> DeviceState:
        def tools(templates: bool = True) -> None:
            if not nvcc:
                raise NO_NVCC
            if templates and not cutlass:
                raise NO_CUTLASS

        self.patch.setattr(toolchain, "toolchain", tools)
        forget()
        return devices.known_of(CUDA)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Machine(monkeypatch)
    monkeypatch.undo()
    forget()


def test_no_kernels_without_nvcc(machine: Machine) -> None:
    state = machine.has(nvcc=False, cutlass=True)
    assert state.arch is None and state.reason == NO_NVCC.what
    assert decision(INT8, CUDA).reason == NO_NVCC.what


def test_without_cutlass_the_quantizer_is_ours_and_products_are_torchs(machine: Machine) -> None:
    state = machine.has(nvcc=True, cutlass=False)
    assert state.arch == "sm_80" and state.compiles and state.lacks == NO_CUTLASS.what
    machine.patch.setattr(kernel_registry, "_stored", lambda unit: False)
    selected = decision(INT8, CUDA)
    assert selected.config is None and selected.reason == NO_CUTLASS.what


def test_complete_toolchain_reads_the_multiprocessor_count(
    machine: Machine,
) -> None:
    state = machine.has(nvcc=True, cutlass=True)
    assert (state.lacks, state.multiprocessors) == (None, 40)
    assert quantize_launch.missing_kernels_message(CUDA) == ""
    assert decision(INT8, CUDA).config is not None


def test_newer_device_uses_kernels_of_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, (12, 0), 99 << 10)
    try:
        assert machine.has(nvcc=True, cutlass=True).arch == "sm_89"
        config = decision(INT8, CUDA).config
        assert config is not None and config.arch == "sm_89"
    finally:
        monkeypatch.undo()
        forget()


@pytest.mark.parametrize(("nvcc", "error"), [(False, NO_NVCC), (True, NO_CUTLASS)])
def test_missing_toolchain_is_reported_once_with_cost_and_remedy(
    machine: Machine, nvcc: bool, error: ToolchainError
) -> None:
    machine.has(nvcc=nvcc, cutlass=False)
    with pytest.warns(PlanWarning) as warned:
        quantize_launch.warn_about_missing_kernels(CUDA)
    [text] = [str(warning.message) for warning in warned]
    assert (
        error.what in text
        and text.endswith(f"To fix this: {error.do}")
        and "cuBLAS" in text
        and "The numbers are the same" in text
    )
    assert ("quantized by code that the compiler fuses" in text) is not nvcc
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_launch.warn_about_missing_kernels(CUDA)


@pytest.mark.parametrize(("capability", "eager"), [((7, 5), True), ((8, 0), True), ((8, 9), False)])
def test_unfused_fp8_is_reported(
    machine: Machine, capability: tuple[int, int], eager: bool
) -> None:
    """Check devices below 8.9, for which Triton has no FP8 conversion: without a kernel, unfused
    torch operators quantize.
    """
    machine.patch.setattr(torch.cuda, "is_available", lambda: True)
    machine.patch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    machine.has(nvcc=False, cutlass=False)
    text = quantize_launch.missing_kernels_message(CUDA)
    assert (
        "to FP8 operator by operator" in text
        and f"capability {capability[0]}.{capability[1]}." in text
    ) is eager
    assert (
        quantize_launch.compiles(FORMATS["int8"], CUDA)
        and quantize_launch.compiles(FORMATS["fp8"], CUDA) is not eager
    )


def test_disabled_kernels_report_no_missing_tool(machine: Machine) -> None:
    machine.patch.setenv("QSYNC_KERNELS", "off")
    assert machine.has(nvcc=False, cutlass=False).arch is None
    assert quantize_launch.missing_kernels_message(CUDA) == ""


@pytest.mark.parametrize(
    ("named", "arch", "compiles", "why"),
    [
        ({}, "sm_80", True, ""),
        ({"QSYNC_NVCC": "/nowhere/nvcc"}, None, False, "this is not a working compiler"),
        ({"QSYNC_CUTLASS_PATH": "/nowhere"}, "sm_80", True, "CUTLASS"),
        ({"QSYNC_KERNELS": "off"}, None, True, "disabled by QSYNC_KERNELS"),
    ],
)
def test_kernel_use_depends_on_tools_and_cache(
    named: dict[str, str],
    arch: str | None,
    compiles: bool,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulate only the GPU; compiler and kernel cache are real."""
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))
    original = devices._has_compiled_kernels
    Machine(monkeypatch).patch.setattr(devices, "_has_compiled_kernels", original)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    forget()
    try:
        state, selected = devices.known_of(CUDA), decision(INT8, CUDA)
        absent = devices.known_of(torch.device("cuda", 1))
    finally:
        monkeypatch.undo()
        forget()
    assert (state.arch, state.compiles) == (arch, compiles) and (state.lacks is None) is (
        not why or "QSYNC_KERNELS" in why
    )
    assert why in (state.reason or state.lacks or "")
    assert (selected.config is not None) is (not why) and why in selected.reason
    assert absent.arch is None and (
        "cuda:1 does not exist" in absent.reason or "QSYNC_KERNELS" in why
    )
