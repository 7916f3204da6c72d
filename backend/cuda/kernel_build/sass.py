"""What came out of the compiler: resources from ptxas's report, instructions from the machine code.

Invariant: a library passes only if it runs as it was meant to: no spilled registers, no serialized matrix products, and the tensor core's
instruction in it. A kernel that fails this is correct and slow, which nobody would notice.

The instructions of machine code for sm_70 that kernels are checked for, read without a disassembler.

Why: disassemblers of CUDA 13 do not know sm_70, and CUDA 12 has none on the package index. An instruction has 128 bits, and its lowest 12
say which it is; those of the three that multiply are here, as nvdisasm 12.8 names them. sm_75 has two of them too, so a test compares.

Invariant: what is no whole ELF file of 64 bits raises; nothing is guessed from its name.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build.library import Resources
from qsync_fx.errors import KernelError

OPCODES: Final = {0x236: "HMMA.884", 0x226: "IDP.4A", 0x223: "FFMA"}
"""Of operands in registers."""

_WIDTH: Final = 16  # bytes


def volta_instructions(path: Path) -> Counter[str]:
    """Returns how often each of `OPCODES` stands in a file that NVRTC wrote; raises `KernelError` for another one."""
    data = path.read_bytes()
    try:
        return Counter(name for code in _sections(data, ".text.") for name in _named(code))
    except (struct.error, ValueError, IndexError) as error:
        raise KernelError(f"this is no machine code: {error}", where=str(path)) from error


def _named(code: bytes) -> list[str]:
    result = (
        int.from_bytes(code[index : index + 2], "little") & 0xFFF
        for index in range(0, len(code), _WIDTH)
    )
    return [OPCODES[opcode] for opcode in result if opcode in OPCODES]


def _sections(data: bytes, prefix: str) -> list[bytes]:
    """Returns the contents of the sections whose names start so (System V ABI, object files)."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no ELF file of 64 bits")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    # name, type, flags, address, offset, size
    headers = [struct.unpack_from("<IIQQQQ", data, offset + index * size) for index in range(count)]
    names = _content(data, headers[names_at])
    return [
        _content(data, header)
        for header in headers
        if names[header[0] : names.index(b"\0", header[0])].startswith(prefix.encode())
    ]


def _content(data: bytes, header: tuple[int, ...]) -> bytes:
    start, size = header[4], header[5]
    if start + size > len(data):
        raise ValueError("it is cut off")
    return data[start : start + size]


def resources(report: str) -> Resources:
    """Returns what `ptxas -v` reports, the largest of all kernels in it."""

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, report)), default=0)

    return Resources(
        registers=largest(r"Used (\d+) registers"),
        shared_memory=largest(r"(\d+)(?:\+\d+)? bytes smem"),
        stack=largest(r"(\d+) bytes stack frame"),
        spills=max(largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads")),
    )


def complaint(report: str) -> str:
    """Returns why kernels with this report of `ptxas -v` must not be used, or ""."""
    if "Potential Performance Loss" in report or "instructions are serialized" in report:
        (line, *_) = [
            line
            for line in report.splitlines()
            if "Performance Loss" in line or "serialized" in line
        ]
        code = re.search(r"\(?(C75\d\d)\)?", line)
        return f"ptxas serializes its matrix products ({code[1] if code else 'no code'})"
    used = resources(report)
    if used.spills:
        return f"it spills {used.spills} bytes of registers to memory (it uses {used.registers})"
    if used.stack:
        return f"it keeps {used.stack} bytes on the stack"
    if not re.search(r"Used \d+ registers", report):
        return "it holds no kernel"
    return ""


def disassembler() -> Path | None:
    """Returns cuobjdump, if nvdisasm, which it calls, is there too."""
    result = toolchain.tool("cuobjdump")
    return result if result and toolchain.tool("nvdisasm", result.parent) else None


def instructions(library: Path) -> Counter[str]:
    """Returns how often each instruction stands in the machine code of a library, with its modifiers ("IMMA.16832.S8.S8.SAT").

    Empty where nothing can look: toolkits from pip wheels have no disassembler, and an older one may not know the target. Of machine code
    by itself, which is that of sm_70, those that `volta_code` knows.
    """
    if library.suffix == ".cubin":
        return volta_instructions(library)
    return named(listing(library))


def listing(code: Path) -> str:
    """Returns the machine code in a library or an object file as text, function by function; "" where nothing can look."""
    program = disassembler()
    if program is None:
        return ""
    nvdisasm = toolchain.tool("nvdisasm", program.parent)
    variables = environment.child_environment(
        **({"NVDISASM_PATH": str(nvdisasm.parent)} if nvdisasm else {})
    )
    command = [str(program), "-sass", str(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=variables, check=False
    )
    return done.stdout if done.returncode == 0 else ""


def named(listed: str) -> Counter[str]:
    """Returns how often each instruction stands in what `listing` gave, or in a part of it."""
    return Counter(_INSTRUCTION.findall(listed))


_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)", flags=re.MULTILINE
)
