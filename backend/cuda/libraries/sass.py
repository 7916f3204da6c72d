"""What came out of the compiler: resources from ptxas's report, instructions from the machine code.

Invariant: a library passes only if it runs as it was meant to: no spilled registers, no serialized matrix products, and the tensor core's
instruction in it. A kernel that fails this is correct and slow, which nobody would notice.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from qsync_fx import environment
from qsync_fx.backend.cuda.libraries import volta_code
from qsync_fx.backend.cuda.libraries.manifest import Resources
from qsync_fx.backend.cuda.tools import toolchain


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
        (line, *_) = [line for line in report.splitlines() if "Performance Loss" in line or "serialized" in line]
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
    found = toolchain.tool("cuobjdump")
    return found if found and toolchain.tool("nvdisasm", found.parent) else None


def instructions(library: Path) -> Counter[str]:
    """Returns how often each instruction stands in the machine code of a library, with its modifiers ("IMMA.16832.S8.S8.SAT").

    Empty where nothing can look: toolkits from pip wheels have no disassembler, and an older one may not know the target. Of machine code
    by itself, which is that of sm_70, those that `volta_code` knows.
    """
    if library.suffix == ".cubin":
        return volta_code.instructions(library)
    return named(listing(library))


def listing(code: Path) -> str:
    """Returns the machine code in a library or an object file as text, function by function; "" where nothing can look."""
    program = disassembler()
    if program is None:
        return ""
    nvdisasm = toolchain.tool("nvdisasm", program.parent)
    variables = environment.child_environment(**({"NVDISASM_PATH": str(nvdisasm.parent)} if nvdisasm else {}))
    command = [str(program), "-sass", str(code)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=variables, check=False)
    return done.stdout if done.returncode == 0 else ""


def named(listed: str) -> Counter[str]:
    """Returns how often each instruction stands in what `listing` gave, or in a part of it."""
    return Counter(_INSTRUCTION.findall(listed))


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)", flags=re.MULTILINE)
