"""Search for nvcc, the host compiler and CUTLASS on simulated machines, whose programs are scripts
that print a version.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.toolchain import ToolProgram
from qsync_fx.errors import ToolchainError

VARIABLES = (
    "QSYNC_NVCC CUDACXX CUDA_HOME CUDA_PATH NVCC_CCBIN CUDAHOSTCXX QSYNC_CUTLASS_PATH CUTLASS_PATH"
)


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine without variables, programs in PATH, or a toolkit in the usual folder."""
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain, "USUAL", str(tmp_path / "usual/bin"))
    monkeypatch.setattr(toolchain, "package_folders", lambda name: [])
    monkeypatch.setattr(toolchain, "BESIDE", tmp_path / "third_party/cutlass")
    return tmp_path


def program(path: Path, says: str, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def nvcc(path: Path, version: str = "13.0.88") -> Path:
    return program(path, f"Cuda compilation tools, release {version[:4]}, V{version}")


def cutlass(root: Path, version: str = "4 2 0") -> Path:
    (root / "tools/util/include").mkdir(parents=True)
    (root / "include/cutlass").mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split(), strict=True)
    (root / "include/cutlass/version.h").write_text(
        "".join(f"#define CUTLASS_{part} {n}\n" for part, n in parts)
    )
    return root


def complains(*words: str) -> ToolchainError:
    with pytest.raises(ToolchainError) as raised:
        toolchain.toolchain()
    error = raised.value
    assert error.where
    assert error.do
    for word in words:
        assert word in str(error), str(error)
    return error


def test_each_missing_tool_is_reported(bare: Path) -> None:
    complains("no nvcc of 12.4 or later", "QSYNC_NVCC", "QSYNC_KERNELS_PATH")
    nvcc(bare / "path/nvcc")
    complains("C++ compiler", "apt-get install g++")
    program(bare / "path/g++", "12.2.0")
    complains("CUTLASS headers were not found", "pip install --no-deps nvidia-cutlass")


def test_toolchain_is_complete(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc(bare / "path/nvcc")
    program(bare / "path/g++", "12.2.0")
    monkeypatch.setenv("QSYNC_CUTLASS_PATH", str(cutlass(bare / "a checkout")))
    tools = toolchain.toolchain()
    assert tools.nvcc == ToolProgram(bare / "path/nvcc", (13, 0, 88))
    assert tools.host == ToolProgram(bare / "path/g++", (12, 2, 0))
    assert tools.cutlass.version == (4, 2, 0)
    assert [path.relative_to(bare).as_posix() for path in tools.cutlass.folders] == [
        "a checkout/include",
        "a checkout/tools/util/include",
    ]


def test_the_order_of_places(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc(bare / "usual/bin/nvcc", "12.4.1")
    nvcc(bare / "path/nvcc", "12.5.1")
    for version, name, path in (
        ("12.6.1", "CUDA_HOME", "home"),
        ("12.8.1", "CUDACXX", "b/nvcc"),
        ("12.9.1", "QSYNC_NVCC", "c/nvcc"),
    ):
        assert toolchain.nvcc().version < tuple(map(int, version.split(".")))
        nvcc(bare / path / "bin/nvcc" if name == "CUDA_HOME" else bare / path, version)
        monkeypatch.setenv(name, str(bare / path))
        assert toolchain.dotted(toolchain.nvcc().version) == version


def test_outdated_tool_is_skipped_and_reported(bare: Path) -> None:
    nvcc(bare / "path/nvcc", "11.8.89")
    complains("no nvcc of 12.4 or later", f"{bare}/path/nvcc is 11.8.89")
    nvcc(bare / "usual/bin/nvcc", "12.8.93")
    assert toolchain.nvcc().path == bare / "usual/bin/nvcc"


def test_failing_tool_is_reported(bare: Path) -> None:
    program(bare / "path/nvcc", "error while loading shared libraries", status=127)
    complains("path/nvcc does not run")


@pytest.mark.parametrize("name", ["QSYNC_NVCC", "CUDACXX"])
def test_tool_named_by_the_user_is_not_skipped(
    name: str, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc(bare / "path/nvcc")
    monkeypatch.setenv(name, str(bare / "nowhere"))
    complains("this is not a working compiler", f"{name}={bare}/nowhere")
    monkeypatch.setenv(name, str(nvcc(bare / "old/nvcc", "12.3.0")))
    complains("this compiler is 12.3.0", f"correct {name}")


def test_unsupported_host_compiler_falls_back_to_a_supported_one(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = ToolProgram(nvcc(bare / "path/nvcc", "12.8.93"), (12, 8, 93))
    program(bare / "path/g++", "15.1.0")
    with pytest.raises(ToolchainError, match="GCC up to 14"):
        toolchain.host_compiler(cuda)
    program(bare / "path/g++-12", "12.2.0")
    assert toolchain.host_compiler(cuda) == ToolProgram(bare / "path/g++-12", (12, 2, 0))
    program(bare / "path/g++-14", "14.2.0")
    assert toolchain.host_compiler(cuda).version == (14, 2, 0)
    # No limit is known for an nvcc newer than the table, and the user's choice has priority.
    assert toolchain.host_compiler(ToolProgram(cuda.path, (14, 0, 0))).version == (15, 1, 0)
    monkeypatch.setenv("NVCC_CCBIN", str(bare / "path"))
    assert toolchain.host_compiler(cuda).version == (15, 1, 0)
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    with pytest.raises(ToolchainError, match="NVCC_CCBIN=no-such-compiler"):
        toolchain.host_compiler(cuda)


def test_a_host_compiler_too_old(bare: Path) -> None:
    program(bare / "path/g++", "5.4.0")
    with pytest.raises(ToolchainError, match=r"5\.4\.0: 7\.5 or later"):
        toolchain.host_compiler(ToolProgram(bare / "nvcc", (13, 0, 88)))


@pytest.mark.parametrize("below", ["", "include", "source"])
def test_cutlass_can_be_configured_in_several_ways(
    below: str, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cutlass(bare / "checkout" / ("source" if below == "source" else ""))
    monkeypatch.setenv(
        "CUTLASS_PATH", str(bare / "checkout" if below == "source" else root / below)
    )
    assert toolchain.cutlass().folders[0] == root / "include"


def test_cutlass_too_old_or_none(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(cutlass(bare / "old", "3 5 1")))
    with pytest.raises(ToolchainError, match=r"CUTLASS 3\.5\.1 is too old"):
        toolchain.cutlass()
    monkeypatch.setenv("QSYNC_CUTLASS_PATH", str(bare))
    with pytest.raises(ToolchainError, match="headers were not found"):
        toolchain.cutlass()


def test_cutlass_next_to_the_sources(bare: Path) -> None:
    cutlass(bare / "third_party/cutlass")
    assert toolchain.cutlass().folders[0] == bare / "third_party/cutlass/include"


def test_the_package_of_cutlass_is_not_imported(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    cutlass(bare / "site/cutlass_library/source")
    (bare / "site/cutlass_library/__init__.py").write_text(
        "raise RuntimeError('the headers are wanted, not the package')\n"
    )
    for name in ("QSYNC_CUTLASS_PATH", "CUTLASS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(bare / "site")
    assert toolchain.cutlass().folders[0] == bare / "site/cutlass_library/source/include"
    assert "cutlass_library" not in sys.modules
