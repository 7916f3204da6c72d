"""The instructions of machine code for sm_70 that kernels are checked for, read without a disassembler.

Why: disassemblers of CUDA 13 do not know sm_70, and CUDA 12 has none on the package index. An instruction has 128 bits, and its lowest 12
say which it is; those of the three that multiply are here, as nvdisasm 12.8 names them. sm_75 has two of them too, so a test compares.

Invariant: what is no whole ELF file of 64 bits raises; nothing is guessed from its name.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Final

from qsync_fx.errors import KernelError

OPCODES: Final = {0x236: "HMMA.884", 0x226: "IDP.4A", 0x223: "FFMA"}
"""Of operands in registers."""

_WIDTH: Final = 16  # bytes


def instructions(path: Path) -> Counter[str]:
    """Returns how often each of `OPCODES` stands in a file that NVRTC wrote; raises `KernelError` for another one."""
    data = path.read_bytes()
    try:
        return Counter(name for code in _sections(data, ".text.") for name in _named(code))
    except (struct.error, ValueError, IndexError) as error:
        raise KernelError(f"this is no machine code: {error}", where=str(path)) from error


def _named(code: bytes) -> list[str]:
    found = (int.from_bytes(code[at : at + 2], "little") & 0xFFF for at in range(0, len(code), _WIDTH))
    return [OPCODES[opcode] for opcode in found if opcode in OPCODES]


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
