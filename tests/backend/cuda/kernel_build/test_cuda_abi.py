"""The C ABI of kernels in Python, compared with C++: sizes, offsets and version from the host
compiler.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qsync_fx.backend.cuda.kernel_build import library
from qsync_fx.backend.cuda.kernel_build.kernel_cache import TEMPLATES

STRUCTURES = (
    library.GemmArguments,
    library.ConvArguments,
    library.QuantizeArguments,
    library.ConvertArguments,
)
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def numbers_of(structure: type[ctypes.Structure]) -> list[int]:
    names = [field[0] for field in structure._fields_]
    fields = [getattr(structure, name) for name in names]
    return [
        ctypes.sizeof(structure),
        *(number for place in fields for number in (place.offset, place.size)),
    ]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_both_sides_agree(tmp_path: Path) -> None:
    lines = []
    for structure in STRUCTURES:
        name = f"qsync::{structure.__name__}"
        fields = (field[0] for field in structure._fields_)
        parts = [
            f"sizeof({name})",
            *(f"offsetof({name}, {field}), sizeof({name}::{field})" for field in fields),
        ]
        lines.append(
            f'    for (std::size_t number : {{{", ".join(parts)}}}) std::printf("%zu ", number);'
        )
        lines.append('    std::printf("\\n");')
    head = [
        "#include <cstddef>",
        "#include <cstdio>",
        "#include <initializer_list>",
        '#include "abi.h"',
        "int main() {",
    ]
    source = tmp_path / "abi.cpp"
    source.write_text(
        "\n".join([*head, *lines, '    std::printf("%d\\n", QSYNC_ABI_VERSION);', "}", ""])
    )
    program = tmp_path / "abi"
    command = [
        str(COMPILER),
        "-std=c++17",
        "-Wall",
        "-Werror",
        f"-I{TEMPLATES}",
        "-o",
        str(program),
        str(source),
    ]
    subprocess.run(command, check=True)
    output = subprocess.run(
        [str(program)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = [*(numbers_of(structure) for structure in STRUCTURES), [library.VERSION]]
    assert [list(map(int, line.split())) for line in output] == expected
