"""Instructions in machine code for sm_70, which tools of CUDA 13 no longer read: counted in code
alone, as a disassembler names them.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import sass
from qsync_fx.errors import KernelError, ToolchainError


def elf(code: bytes, name: bytes = b".text.kernel") -> bytes:
    """Machine code in the smallest file that holds any: a section of it, and one of names."""
    names = b"\0" + name + b"\0.shstrtab\0"
    sections = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 64, len(code))]
    sections.append((2 + len(name), 3, 0, 0, 64 + len(code), len(names)))
    table = b"".join(struct.pack("<IIQQQQ", *section) + bytes(24) for section in sections)
    start = 64 + len(code) + len(names)
    head = (
        b"\x7fELF\x02"
        + bytes(35)
        + struct.pack("<Q", start)
        + bytes(10)
        + struct.pack("<HHH", 64, 3, 2)
    )
    return head[:64] + code + names + table


def instruction(opcode: int, condition: int = 7) -> bytes:
    return struct.pack("<QQ", opcode | condition << 12 | 0x2F16 << 24, 0x000FE20000000635)


def test_instructions_are_counted_in_code_alone(tmp_path: Path) -> None:
    code = instruction(0x226) * 3 + instruction(0x223, condition=0) + instruction(0x210)
    file = tmp_path / "x.cubin"
    file.write_bytes(elf(code))
    assert sass.volta_instructions(file) == {"IDP.4A": 3, "FFMA": 1}
    file.write_bytes(elf(code, b".data.kernel"))
    assert not sass.volta_instructions(file)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-64],
        lambda whole: whole[:70],
        lambda whole: b"\x7fELF\x01",
        lambda whole: b"",
    ],
)
def test_invalid_machine_code_is_an_error(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "x.cubin"
    file.write_bytes(damage(elf(instruction(0x223))))
    with pytest.raises(KernelError, match="not machine code"):
        sass.volta_instructions(file)


MULTIPLIES = """
__global__ void multiply(const float* x, float* y, const int* a, int* sums) {
  float u = x[threadIdx.x], v = x[threadIdx.x + 32];
  for (int i = 0; i < 5; ++i) u = fmaf(u, v, v);
  y[threadIdx.x] = u;
  int sum = __dp4a(a[threadIdx.x], a[threadIdx.x + 32], sums[threadIdx.x]);
  sums[threadIdx.x] = __dp4a(sum, a[threadIdx.x + 64], sum);
}
"""


def test_instructions_equal_the_disassembler(tmp_path: Path) -> None:
    """On sm_75, which every disassembler knows, and where the two instructions without tensor cores
    are the same.
    """
    try:
        nvcc = toolchain.toolchain("sm_75").nvcc.path
    except ToolchainError as error:
        pytest.skip(str(error))
    disassembler = toolchain.tool("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not here")
    source, code = tmp_path / "multiply.cu", tmp_path / "multiply.cubin"
    source.write_text(MULTIPLIES)
    subprocess.run([nvcc, "-cubin", "-arch=sm_75", source, "-o", code], check=True)
    text = subprocess.run([disassembler, code], check=True, capture_output=True, text=True).stdout
    named = re.findall(
        r"\b(FFMA|IDP\.4A)(?:\.\w+)* R\w+, R\w+(?:\.\w+)*, R\w+(?:\.\w+)*, R\w+ *;", text
    )

    found = sass.volta_instructions(code)

    assert found == {"FFMA": named.count("FFMA"), "IDP.4A": named.count("IDP.4A")}
    assert found["FFMA"] >= 5
    assert found["IDP.4A"] == 2
