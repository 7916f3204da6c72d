"""AMX kernels with tile instructions emulated in C++, compared bit by bit with the scalar path.

BF16 products are bit-equal if their sums are exact, and close otherwise. All other code, such as
the packing, is compiled as for a processor with AMX and runs with AVX-512.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qsync_fx import _C

REPOSITORY = Path(__file__).parents[3]
SUPPORT = REPOSITORY / "tests/support/native"
GEMM = REPOSITORY / "cpp/gemm"
FLAGS = "-std=c++17 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -DQSYNC_X86 -DQSYNC_AMX".split()
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-maybe-uninitialized".split()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compiled program that compares random products of both paths."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile it")
    if "avx512" not in _C.available_isas():
        pytest.skip("its packing runs by AVX-512, which this processor has not")
    folder = tmp_path_factory.mktemp("amx")
    kernel, executable = folder / "amx.o", folder / "amx_against_scalar"
    command = [compiler, *FLAGS, f"-I{REPOSITORY / 'cpp'}"]
    subprocess.run(
        [*command, *AVX512, "-c", SUPPORT / "emulated_amx.cpp", "-o", kernel], check=True
    )
    sources = [
        SUPPORT / "amx_against_scalar.cpp",
        *(GEMM / f"{name}.cpp" for name in ("gemm", "windows", "workspace")),
    ]
    scalar = [
        *command,
        "-DQSYNC_INT8=scalar_int8",
        "-DQSYNC_BF16=scalar_bf16",
        *(GEMM / f"paths/{name}.cpp" for name in ("pairs", "floats")),
    ]
    subprocess.run([*scalar, *sources, kernel, "-o", executable], check=True)
    return executable


def test_products_equal_the_scalar_variant(program: Path) -> None:
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout == f"{40 * (3 * 3 * 3 * 2 + 1)} products, 0 differ\n"


def test_a_tile_is_not_used_before_it_is_configured(program: Path) -> None:
    """The emulation detects unconfigured tiles, so the products above also test the configuration."""
    result = subprocess.run(
        [program, "unconfigured"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout) == (3, "a tile is used that is not configured\n")
