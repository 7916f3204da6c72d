"""Verification of compiled code: resources from the ptxas report, instructions from SASS.

Invariant: a library passes only without spilled registers, without serialized matrix products, and
with the tensor core instruction. Kernels that fail are correct but slow, which would otherwise go
unnoticed.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from qsync_fx import environment
from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build.library import Resources


def resources(report: str) -> Resources:
    """Return the resources reported by `ptxas -v`, the maximum over all kernels."""

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, report)), default=0)

    return Resources(
        registers=largest(r"Used (\d+) registers"),
        shared_memory=largest(r"(\d+)(?:\+\d+)? bytes smem"),
        stack=largest(r"(\d+) bytes stack frame"),
        spills=max(largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads")),
    )


def complaint(report: str) -> str:
    """Return why kernels with this `ptxas -v` report must not be used; "" if they may."""
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
        return f"it uses {used.stack} bytes of stack"
    if not re.search(r"Used \d+ registers", report):
        return "it contains no kernel"
    return ""


def disassembler() -> Path | None:
    """Return cuobjdump, if nvdisasm, which it calls, exists too."""
    result = toolchain.tool("cuobjdump")
    return result if result and toolchain.tool("nvdisasm", result.parent) else None


def instructions(library: Path) -> Counter[str]:
    """Return the count of each SASS instruction, with modifiers ("IMMA.16832.S8.S8.SAT").

    Empty without a suitable disassembler: pip wheels of the toolkit have none, and an older one may
    not support the target.
    """
    return named(listing(library))


def listing(code: Path) -> str:
    """Return the disassembly of a library or object file; "" without a suitable disassembler."""
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
    """Return the count of each instruction in the text of `listing`, or in a part of it."""
    return Counter(_INSTRUCTION.findall(listed))


_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)", flags=re.MULTILINE
)
