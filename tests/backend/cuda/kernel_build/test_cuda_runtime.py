"""Search for the CUDA runtime of kernel libraries outside the system's library path."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import library
from qsync_fx.errors import KernelError
from tests.support.cuda.compiled.kernel_caches import tools_or_skip
from tests.support.cuda.compiled.small_units import build, small_unit

pytest_plugins = ["tests.support.cuda.compiled.kernel_caches"]
TOOLS = tools_or_skip()


def test_runtime_is_found_outside_the_system_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load a runtime of a version that does not exist, from a folder as in torch's wheels."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "one.c").write_text("int cuda_of_test(void) { return 41; }")
    (tmp_path / "two.c").write_text(
        "int cuda_of_test(void); int answer(void) { return cuda_of_test() + 1; }"
    )
    for output, source, *flags in (
        ("lib/libcudart.so.99", "one.c", "-Wl,-soname,libcudart.so.99"),
        ("kernel.so", "two.c", str(tmp_path / "lib/libcudart.so.99")),
    ):
        subprocess.run(
            [
                TOOLS.host.path,
                "-x",
                "c",
                source,
                "-x",
                "none",
                "-shared",
                "-fPIC",
                "-o",
                output,
                *flags,
            ],
            cwd=tmp_path,
            check=True,
        )
    with pytest.raises(
        KernelError, match=r"needs the CUDA runtime libcudart.so.99[\s\S]*includes CUDA 99"
    ):
        library._opened(tmp_path / "kernel.so")
    monkeypatch.setattr(toolchain, "wheel_folders", lambda name: [tmp_path / name])
    assert library._opened(tmp_path / "kernel.so").answer() == 42


def test_the_runtime_of_this_toolkit_is_found() -> None:
    name = f"libcudart.so.{TOOLS.nvcc.version[0]}"
    assert [folder for folder in library._runtime_folders() if (folder / name).is_file()]


def test_a_toolkit_from_pip_wheels_has_the_runtime_under_its_full_name_only(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = toolchain.library_folders(TOOLS.nvcc.path)
    shared = [path for folder in real for path in folder.glob("libcudart.so.*")]
    if not shared:
        pytest.skip("this toolkit has no shared runtime")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / shared[0].name).symlink_to(shared[0])
    monkeypatch.setattr(
        "qsync_fx.backend.cuda.kernel_build.compiler.library_folders",
        lambda compiler: (tmp_path / "lib",),
    )
    unit = small_unit("linked")
    path = build([unit])[unit]
    library.load(path, unit)
    assert library.shared_memory(path) == 4096
