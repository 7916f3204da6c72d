"""Kernels for sm_70 by NVRTC of CUDA 12: compiled, looked at, and asked what they take, on a
machine without a GPU.

Where NVRTC is missing, what needs it is skipped; QSYNC_NVRTC names a folder that `pip install
--target` has filled.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain, toolchain as nvrtc_compile
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache, kernel_registry, library
from qsync_fx.backend.cuda.kernel_build.library import GemmArguments, Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.selection import candidates
from qsync_fx.backend.cuda.selection.candidates_gemm import gemm_configs
from qsync_fx.errors import KernelError, ToolchainError

CONFIGS = list(gemm_configs("sm_70"))
SAMPLE = {
    "fp16": next(config for config in CONFIGS if config.a == "fp16" and config.order == "stream_k"),
    "int8": next(config for config in CONFIGS if config.a == "int8" and config.b_major == "row"),
    "fp32": next(config for config in CONFIGS if config.a == "fp32"),
}
NO_DRIVER = 900


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        toolchain.toolchain("sm_70")
    except ToolchainError as error:
        pytest.skip(str(error))
    return kernel_cache.prepare(tmp_path_factory.mktemp("volta"))


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, Library]:
    units = {name: kernel_registry.unit_of(config) for name, config in SAMPLE.items()}
    paths = compiler.build(list(units.values()), progress=False, folder=folder)
    return {name: library.load(paths[unit], unit) for name, unit in units.items()}


def arguments(
    config: KernelConfig, m: int = 256, n: int = 128, k: int = 64, **changes: int
) -> GemmArguments:
    """Arguments of a product whose operands lie at addresses that nothing reads here."""
    lda, ldb = k if config.a_major == "row" else m, n if config.b_major == "row" else k
    given = {
        "a": 1 << 20,
        "b": 2 << 20,
        "d": 3 << 20,
        "lda": lda,
        "ldb": ldb,
        "ldd": n,
        "m": m,
        "n": n,
        "k": k,
    }
    return GemmArguments(**given | {"multiprocessors": 80} | changes)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "opcode"), [("fp16", "HMMA.884"), ("int8", "IDP.4A"), ("fp32", "FFMA")]
)
def test_kernel_has_its_instruction_and_no_spills(
    built: dict[str, Library], name: str, opcode: str
) -> None:
    entry = kernel_cache.read(built[name].path.parent)
    assert entry is not None
    found = entry.manifest
    assert (found.opcode, found.arch, found.refused) == (opcode, "sm_70", "")
    assert found.resources.spills == found.resources.stack == 0
    assert 0 < found.resources.registers <= 255
    assert found.resources.shared_memory == built[name].shared_memory() > 0
    assert re.match(r"NVRTC 12\.\d+|nvcc 12\.\d+", found.compilers)


@pytest.mark.parametrize("name", SAMPLE)
def test_kernel_reports_unsupported_arguments(built: dict[str, Library], name: str) -> None:
    kernel, config = built[name], SAMPLE[name]
    assert kernel.can_implement(arguments(config)) is None
    assert "Invalid Problem" in str(kernel.can_implement(arguments(config, m=0)))
    assert "Misaligned" in str(kernel.can_implement(arguments(config, a=(1 << 20) + 1)))
    split = arguments(config, n=512, split=2)
    if config.order == "stream_k":
        assert kernel.can_implement(split) is None
        assert kernel.workspace(split) > 0
    else:
        assert "Invalid Problem" in str(kernel.can_implement(split))
        assert kernel.workspace(arguments(config)) == 0


@pytest.mark.parametrize("name", SAMPLE)
def test_without_a_driver_running_is_an_error_and_all_else_answers(
    built: dict[str, Library], name: str
) -> None:
    assert built[name].error(NO_DRIVER) == "there is no CUDA driver here (libcuda.so.1)"
    if has_driver():
        pytest.skip("there is a driver")
    with pytest.raises(KernelError, match=r"libcuda\.so\.1"):
        built[name].run(arguments(SAMPLE[name]), 1 << 22, 0)


@pytest.fixture(scope="module")
def driver(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver that writes down what it is asked, see driver_on_cpu.cpp."""
    tools = toolchain.toolchain("sm_70")
    place = tmp_path_factory.mktemp("driver")
    headers = tools.toolkit or [
        path.parent / "include" for path in toolchain.library_folders(tools.nvcc.path)
    ]
    source = Path(__file__).parents[3] / "support" / "cuda" / "stand_ins" / "driver_on_cpu.cpp"
    command = [
        str(tools.host.path),
        "-x",
        "c++",
        "-shared",
        "-fPIC",
        "-fpermissive",
        "-w",
    ]
    output = ["-o", str(place / "libcuda.so.1"), str(source)]
    subprocess.run([*command, *(f"-I{path}" for path in headers), *output], check=True)
    return place


def told(driver: Path, code: str, **variables: str) -> list[str]:
    """Runs `code` where that driver is the machine's, and returns what it was asked."""
    log = driver / "log"
    log.unlink(missing_ok=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver), "DRIVER_LOG": str(log)} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines() if log.exists() else []


def calls(kernel: Library, config: KernelConfig, *lines: str) -> str:
    """A program that has the library as `run(**changes)` and `workspace(**changes)`, and then does
    `lines`.
    """
    fields = {name: getattr(arguments(config), name) for name, *_ in GemmArguments._fields_}
    start = (
        "import ctypes, threading",
        "from qsync_fx.backend.cuda.kernel_build.library import GemmArguments",
        f"handle = ctypes.CDLL({str(kernel.path)!r})",
        "handle.qsync_workspace.restype, handle.qsync_error.restype = ctypes.c_int64, "
        "ctypes.c_char_p",
        "handle.qsync_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)",
        f"given = lambda changes: ctypes.byref(GemmArguments(**{fields!r} | changes))",
        "run = lambda memory=0, stream=7, **changes: handle.qsync_run(given(changes), memory, "
        "stream)",
        "workspace = lambda **changes: handle.qsync_workspace(given(changes))",
    )
    return "\n".join((*start, *lines))


def test_code_is_loaded_once_a_device_and_launched_in_its_context(
    built: dict[str, Library], driver: Path
) -> None:
    kernel, config = built["fp32"], SAMPLE["fp32"]
    code = (
        "threads = [threading.Thread(target=lambda n=n: [run(device=n % 2) for _ in range(20)]) "
        "for n in range(4)]",
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]",
    )
    lines = told(driver, calls(kernel, config, *code))
    assert sorted(line for line in lines if line.startswith("load")) == [
        "load 0 elf=1",
        "load 1 elf=1",
    ]
    # 256 x 128 in tiles of 128 x 128, swizzled by one since there is one tile across.
    for device in (0, 1):
        launched = [line for line in lines if line.startswith(f"launch {device} ")]
        shared = kernel.shared_memory()
        wanted = (
            f"launch {device} in {device} grid 2 1 1 block 256 1 1 shared {shared} stream 7 sizes "
            "256 128 64 extra 0"
        )
        assert launched == [wanted] * 40
    assert {line for line in lines if line.startswith("pop")} == {"pop to -1"}
    assert sum(line.startswith("pop") for line in lines) == 2 + 80


def test_a_workspace_is_cleared_on_the_stream_before_the_launch(
    built: dict[str, Library], driver: Path
) -> None:
    code = (
        "changes = dict(n=512, ldd=512, split=2)",
        "size = workspace(**changes)",
        "assert size > 0",
        "assert handle.qsync_error(run(**changes)) == b'Error Workspace Null'",
        "assert run(memory=4096, **changes) == 0",
    )
    lines = [
        line
        for line in told(driver, calls(built["fp16"], SAMPLE["fp16"], *code))
        if line[:3] in ("cle", "lau")
    ]
    assert [line.split()[0] for line in lines] == ["clear", "launch"]
    assert re.fullmatch(r"clear 0 \d+ 0 \d+ 7", lines[0])


def test_driver_errors_contain_the_driver_message(built: dict[str, Library], driver: Path) -> None:
    for changes, variables, words in (
        ("", {"DRIVER_FULL": "1"}, "too many resources"),
        ("", {"DRIVER_BROKEN": "1"}, "not initialized"),
        ("device=2", {}, "no such device"),
    ):
        code = (
            f"status = run({changes})",
            f"assert status and handle.qsync_error(status) == {words.encode()!r}",
        )
        told(driver, calls(built["int8"], SAMPLE["int8"], *code), **variables)


def test_a_library_needs_no_runtime_of_cuda_and_shows_only_its_interface(
    built: dict[str, Library],
) -> None:
    said = subprocess.run(
        ["nm", "-D", built["fp16"].path], capture_output=True, text=True, check=True
    ).stdout
    defined = {line.split()[-1] for line in said.splitlines() if " T " in line}
    assert {"qsync_run", "qsync_abi", "qsync_error"} <= defined
    assert all(name.startswith("qsync_") for name in defined)
    assert not re.findall(r" U (?:cuda|cu[A-Z])\w*", said)


def test_parts_that_disagree_on_parameters_are_no_library(
    built: dict[str, Library], tmp_path: Path
) -> None:
    kernel = built["fp32"]
    (tmp_path / "x.so.part").write_bytes(kernel.path.read_bytes())
    log = (kernel.path.parent / "log").read_text()
    if "NVRTC" not in (kernel.path.parent / "manifest.json").read_text():
        pytest.skip("nvcc compiled it")
    code = (
        "import os, runpy, sys; module = runpy.run_path(sys.argv[1]); os.chdir(sys.argv[2]);"
        "module['agree']('x', sys.stdin.read())"
    )
    command = [sys.executable, "-I", "-c", code, nvrtc_compile.__file__, str(tmp_path)]
    assert (
        subprocess.run(command, input=log, text=True, check=False, capture_output=True).returncode
        == 0
    )
    other = re.sub(r"\d+ bytes cmem\[0\]", "500 bytes cmem[0]", log)
    done = subprocess.run(command, input=other, text=True, check=False, capture_output=True)
    assert done.returncode != 0
    assert "takes [500] bytes" in done.stderr


def test_only_products_are_compiled_without_a_model() -> None:
    units = candidates.of_all("sm_70")
    assert {unit.interface for unit in units} == {"gemm"}
    assert {unit.opcode for unit in units} == {"HMMA.884", "IDP.4A", "FFMA"}


def test_options_unsupported_by_nvrtc_are_reported_before_compilation(folder: Path) -> None:
    if not toolchain.toolchain("sm_70").toolkit:
        pytest.skip("nvcc compiles for sm_70 here")
    unit = kernel_registry.quantizer("sm_70", "fp32", "int8")
    failure = compiler.attempt([unit], progress=False, folder=folder).failures[unit]
    assert "only GEMM kernels are compiled for sm_70" in str(failure)


def test_an_error_in_a_source_is_shown_with_the_command(folder: Path) -> None:
    unit = dataclasses.replace(
        kernel_registry.unit_of(SAMPLE["fp32"]), name="broken", source="this is no source\n"
    )
    failure = compiler.attempt([unit], progress=False, folder=folder).failures[unit]
    assert "broken.cu" in str(failure)
    assert " broken" in str(failure.where)
    assert (folder / "failed" / "broken.cu").is_file()


def test_command_names_the_packages_to_install(tmp_path: Path) -> None:
    """`qsync kernels build --arch sm_70` where nothing compiles for it: in an interpreter that
    finds no wheels of NVIDIA's.
    """
    code = (
        "import sys\n"
        "from qsync_fx.backend.cuda import toolchain, toolchain\n"
        "toolchain.package_folders = lambda name: []\n"
        "toolchain._compiles_for_volta = lambda: False\n"
        "from qsync_fx.cli import main\n"
        "sys.exit(main(['kernels', 'build', '--arch', 'sm_70', '--output', sys.argv[1]]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "QSYNC_NVRTC"}
    command = [sys.executable, "-c", code, str(tmp_path / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "pip install 'qsync-fx[volta]'" in done.stderr, done.stderr
