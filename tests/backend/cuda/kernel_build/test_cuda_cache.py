"""Builds, cache and loads of kernel libraries, with nvcc on units of a few lines."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import compiler, library
from qsync_fx.backend.cuda.kernel_build.kernel_cache import content_key
from qsync_fx.backend.cuda.kernel_build.library import GemmArguments
from qsync_fx.errors import KernelError, ToolchainError
from tests.support.cuda.compiled.kernel_caches import UNIT, entry_of, nothing_is_left, tools_or_skip
from tests.support.cuda.compiled.small_units import SPILLS, build, small_unit

pytest_plugins = ["tests.support.cuda.compiled.kernel_caches"]
TOOLS = tools_or_skip()


def test_built_kernels_are_cached(home: Path, calls: Callable[[], int]) -> None:
    path = build([UNIT, UNIT])[UNIT]
    assert path == entry_of(home).library
    assert path.is_file()
    assert calls() == 0
    assert nothing_is_left(home)


def test_a_library_answers(home: Path) -> None:
    path = build([UNIT])[UNIT]
    loaded = library.load(path, UNIT)
    assert loaded is library.load(path, UNIT)
    assert loaded.can_implement(GemmArguments(n=8)) is None
    assert loaded.can_implement(GemmArguments(n=3)) == "Error Misaligned Operand"
    # More than 32 bits.
    assert loaded.workspace(GemmArguments(m=5000)) == 5000 * 1000000007
    assert library.shared_memory(path) == 4096
    with pytest.raises(KernelError, match="Error Workspace Null"):
        loaded.run(GemmArguments(n=8), 0, 0)
    assert not hasattr(ctypes.CDLL(None), "qsync_run"), (
        "the symbols of a kernel library are not global"
    )


def test_compiled_libraries_stay_loaded(home: Path, tmp_path: Path) -> None:
    """Check that another process inspects the library: on a GPU, a library that was loaded, unloaded
    and loaded again crashed or hung at launch.
    """
    log = tmp_path / "ran"
    constructor = f"""
#include <cstdio>
#include <unistd.h>
__attribute__((constructor)) static void loaded() {{
    if (std::FILE *file = std::fopen("{log}", "a")) {{ std::fprintf(file, "%d\\n", int(getpid())); std::fclose(file); }}
}}
"""
    unit = small_unit("tells")
    unit = dataclasses.replace(unit, source=unit.source + constructor)
    path = build([unit])[unit]
    inspector_pids = [int(line) for line in log.read_text().split()]
    assert len(inspector_pids) == 1
    assert os.getpid() not in inspector_pids
    library.load(path, unit)
    assert os.getpid() in [int(line) for line in log.read_text().split()]


OUTLIVES = """
import sys
from pathlib import Path
from tests.support.cuda.compiled.kernel_caches import UNIT
from qsync_fx.backend.cuda.kernel_build import library
from qsync_fx.backend.cuda.kernel_build.library import GemmArguments

path = Path(sys.argv[1])
whole = path.read_bytes()
loaded = library.load(path, UNIT)
{change}
assert loaded.can_implement(GemmArguments(n=3)) == "Error Misaligned Operand"
assert loaded.workspace(GemmArguments(m=5000)) == 5000 * 1000000007
print("answered")
"""


@pytest.mark.parametrize(
    "change",
    [
        "path.write_bytes(b'')",
        "path.write_bytes(whole[:-1])",
        "path.write_bytes(whole)",
        "path.unlink()",
    ],
)
def test_a_library_outlives_its_file(home: Path, change: str) -> None:
    """Overwrite the file in place, as cp does, truncate or delete it: a process that has loaded it
    works on and exits.
    """
    script = OUTLIVES.format(change=change)
    python = [sys.executable, "-c", script, str(entry_of(home).library)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(python, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "answered\n"), done.stderr


def test_manifest_content(home: Path) -> None:
    manifest = entry_of(home).manifest
    assert (manifest.name, manifest.arch, manifest.refused) == ("small", "sm_80", "")
    assert 0 < manifest.resources.registers < 40
    assert (manifest.resources.stack, manifest.resources.spills) == (0, 0)
    assert manifest.seconds > 0
    assert abs(manifest.created - time.time()) < 3600
    assert manifest.compilers.startswith(
        f"nvcc {toolchain.dotted(TOOLS.nvcc.version)}, host compiler "
    )


def test_library_of_another_unit_is_not_loaded(home: Path, tmp_path: Path) -> None:
    path = build([UNIT])[UNIT]
    with pytest.raises(KernelError, match="its name is 'small', not 'other'"):
        library.load(path, small_unit("other"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(KernelError, match="cannot load it"):
        library.load(tmp_path / "text.so", UNIT)
    libm = next(
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libm." in line
    )
    with pytest.raises(KernelError, match="not export the function qsync_"):
        library.load(libm, UNIT)


def test_library_of_another_version_is_not_loaded(home: Path) -> None:
    unit = small_unit(abi="QSYNC_ABI_VERSION + 1")
    with pytest.raises(KernelError, match="ABI version is 2, not 1"):
        library.load(build([unit])[unit], unit)


@pytest.mark.parametrize(
    "change", [{"arch": "sm_86"}, {"opcode": "FFMA"}, {"remark": "!"}, {"interface": "conv"}]
)
def test_key_covers_all_inputs(change: dict[str, str]) -> None:
    assert content_key(small_unit(**change)) != content_key(UNIT)
    assert content_key(small_unit()) == content_key(UNIT)


def test_headers_of_ours_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    (tmp_path / "abi.h").write_text('#pragma once\n#  include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("// one\n")
    (tmp_path / "unused.h").write_text("// one\n")
    monkeypatch.setattr(kernel_cache, "TEMPLATES", tmp_path)
    assert set(kernel_cache.included(UNIT.source)) == {"abi.h", "inner.cuh"}
    before = content_key(UNIT)
    (tmp_path / "unused.h").write_text("// two\n")
    assert content_key(UNIT) == before
    (tmp_path / "inner.cuh").write_text("// two\n")
    assert content_key(UNIT) != before


def test_flags_in_the_environment_are_in_the_key(
    home: Path, calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    build([UNIT])
    assert calls() == 1


def test_digest_of_headers_follows_their_contents(tmp_path: Path) -> None:
    from qsync_fx.backend.cuda.kernel_build.kernel_cache import headers_digest

    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "a.h").write_text("one")
    headers = toolchain.Headers((folder,), (4, 2, 0))
    first = headers_digest(headers)
    os.utime(folder / "a.h", (0, 0))
    assert headers_digest(headers) == first
    (folder / "a.h").write_text("three")
    assert headers_digest(headers) != first


# Failures.


def test_a_source_that_does_not_compile(home: Path) -> None:
    bad, good = small_unit("bad", body="int x = nowhere_defined;"), UNIT
    result = compiler.attempt([bad, good], progress=False)
    assert list(result.libraries) == [good]
    error = result.failures[bad]
    assert isinstance(error, ToolchainError)
    assert 'identifier "nowhere_defined" is undefined' in str(error)
    assert nothing_is_left(home)
    # The command in the error message reproduces the error.
    assert error.where is not None
    again = subprocess.run(error.where, shell=True, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert "nowhere_defined" in again.stderr + again.stdout
    with pytest.raises(ToolchainError, match="nowhere_defined"):
        build([bad, good], progress=False)


def test_kernel_with_register_spills_is_refused_and_recorded(
    home: Path, calls: Callable[[], int]
) -> None:
    unit = small_unit("slow", body=SPILLS)
    for _ in range(2):
        with pytest.raises(KernelError, match="must not be used: it uses 1200 bytes of stack"):
            build([unit], progress=False)
    assert calls() == 1


def test_kernel_without_its_instruction_is_refused(home: Path) -> None:

    if compiler.disassembler() is None:
        pytest.skip("no cuobjdump and nvdisasm")
    units = [small_unit(opcode="FFMA"), small_unit("other", opcode="IMMA")]
    result = compiler.attempt(units, progress=False)
    assert result.libraries.keys() == {units[0]}
    assert "has no IMMA" in str(result.failures[units[1]])


def test_a_name_that_leads_elsewhere(home: Path) -> None:
    with pytest.raises(KernelError, match="not a valid file name"):
        build([dataclasses.replace(UNIT, name="../../x")])
    assert nothing_is_left(home)


# Machines without a compiler.


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_NVCC", "/nowhere/nvcc")


@pytest.mark.usefixtures("no_compiler")
def test_cached_kernels_are_used_without_a_compiler(home: Path) -> None:
    assert build([UNIT])[UNIT] == entry_of(home).library
    with pytest.raises(ToolchainError, match="QSYNC_NVCC=/nowhere/nvcc"):
        build([UNIT, small_unit("other")])


@pytest.mark.usefixtures("no_compiler")
def test_ahead_of_time_kernels_are_used_without_a_compiler(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(home / "kernels", tmp_path / "brought here")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(
        "QSYNC_KERNELS_PATH", f"{tmp_path / 'empty'}{os.pathsep}{tmp_path / 'brought here'}"
    )
    path = build([UNIT])[UNIT]
    assert path.is_relative_to(tmp_path / "brought here")
    assert library.load(path, UNIT).can_implement(GemmArguments(n=8)) is None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ToolchainError):
        build([UNIT])
    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(tmp_path / "missing"))
    with pytest.raises(KernelError, match=r"does not exist[\s\S]*QSYNC_KERNELS_PATH"):
        build([UNIT])


def test_separate_cache_folder(home: Path, tmp_path: Path, calls: Callable[[], int]) -> None:
    """Build into a folder as `qsync kernels build --output` does: also units that are in the
    cache.
    """
    path = build([UNIT], folder=tmp_path / "to carry")[UNIT]
    assert path.is_relative_to(tmp_path / "to carry")
    assert calls() == 1
