"""Compiles a kernel without nvcc: machine code by NVRTC, functions by the host compiler, both from the same text, in one library.

A program of its own, which imports nothing of ours: what it does is ended, repeated and read from its output as a run of nvcc is.

    python nvrtc_compile.py --nvrtc LIBRARY --host COMPILER --arch sm_70 -I FOLDER... NAME

NAME.cu becomes NAME.cubin and NAME.so, in the current folder. Warnings, errors and the report of ptxas go to standard error.

Invariant: NAME.so is there only if both parts agree on the size of the kernel's parameters, as the machine code tells it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

DEVICE_FLAGS = ("-std=c++17", "-default-device", "-DNDEBUG", "--ptxas-options=-v")
HOST_FLAGS = ("-std=c++17", "-O2", "-fpermissive", "-w", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden")
LINKED = ("-Wl,-z,defs", "-ldl")

# NVRTC has no headers of the host's.
_STANDARD = {
    name: f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"
    for name in ("cstdint", "limits", "type_traits")
}
_FIRST_PARAMETER = 0x160
"""Where a kernel's parameters start in constant bank 0, on sm_70 and up to sm_89."""


class Failed(Exception):
    """What is told in the output before the program ends with status 1."""


def machine_code(library: str, name: str, arch: str, folders: list[str]) -> tuple[bytes, str]:
    """Returns the machine code of NAME.cu and what NVRTC and ptxas reported; raises `Failed` with the report."""
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(function: str, *arguments: object) -> None:
        status = getattr(nvrtc, function)(*arguments)
        if status:
            raise Failed(f"{function}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def text(what: str) -> bytes:
        call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{what}", program, found)
        return found.raw

    names, texts = _strings(list(_STANDARD)), _strings(list(_STANDARD.values()))
    source = Path(f"{name}.cu").read_bytes()
    call("nvrtcCreateProgram", ctypes.byref(program), source, f"{name}.cu".encode(), len(_STANDARD), texts, names)
    options = [f"-arch={arch}", *DEVICE_FLAGS, *(f"-I{folder}" for folder in folders)]
    failed = None
    try:
        call("nvrtcCompileProgram", program, len(options), _strings(options))
    except Failed as error:
        failed = error
    report = text("ProgramLog").rstrip(b"\0").decode(errors="replace")
    if failed:
        raise Failed(f"{report}\n{failed}")
    return text("CUBIN"), report


def _strings(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def host_code(compiler: str, name: str, folders: list[str]) -> None:
    """Compiles NAME.cu once more, with NAME.cubin in it, to NAME.so.part; raises `Failed`."""
    includes = [f"-I{folder}" for folder in folders]
    code = f'-DQSYNC_CODE="{name}.cubin"'
    command = [compiler, "-x", "c++", *HOST_FLAGS, code, *includes, "-o", f"{name}.so.part", f"{name}.cu", *LINKED]
    if status := subprocess.run(command, check=False).returncode:
        raise Failed(f"the host compiler ended with status {status}")


def agree(name: str, report: str) -> None:
    """Raises `Failed` where the parts do not have the same parameters: such a kernel would read what is not there."""
    banks = {int(size) for size in re.findall(r"(\d+) bytes cmem\[0\]", report)}
    passed = ctypes.CDLL(os.path.abspath(f"{name}.so.part")).qsync_parameters()
    if banks != {_FIRST_PARAMETER + passed}:
        raise Failed(
            f"the machine code takes {sorted(banks)} bytes with {_FIRST_PARAMETER} before, the host gives {passed}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles NAME.cu to NAME.cubin and NAME.so without nvcc.")
    parser.add_argument("--nvrtc", metavar="LIBRARY", required=True)
    parser.add_argument("--host", metavar="COMPILER", required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("-I", dest="folders", metavar="FOLDER", action="append", default=[])
    parser.add_argument("name")
    given = parser.parse_args()
    try:
        code, report = machine_code(given.nvrtc, given.name, given.arch, given.folders)
        print(report, file=sys.stderr, flush=True)
        Path(f"{given.name}.cubin").write_bytes(code)
        host_code(given.host, given.name, given.folders)
        agree(given.name, report)
        os.replace(f"{given.name}.so.part", f"{given.name}.so")
    except (Failed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
