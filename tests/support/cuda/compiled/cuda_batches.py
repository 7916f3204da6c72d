"""Many kernels compiled in one file, to be looked at and thrown away: CUTLASS's headers take longer
to read than a kernel to compile.

Invariant: a batch passes only if each kernel in it would: nothing that ptxas says of any of them is
    a complaint, and as many functions as there are kernels hold the instruction. One that does not
    pass is halved until it is known which kernels are at fault.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler
from qsync_fx.progress import Advance

TOGETHER = {True: 8, False: 16}
"""Kernels of CUTLASS 3 (heavy) and others in one file."""

MEMORY = 6_500_000_000
"""Bytes that nvcc takes for eight heavy ones; measured with nvcc 13.0."""

ADAPTERS = {"gemm": ("Gemm", "GemmArguments"), "conv": ("Conv", "ConvArguments")}
"""By the unit's interface: what makes a kernel of a configuration, and what it is called with."""


@dataclass(frozen=True)
class Passed:
    """A batch whose kernels all passed: how many, an instruction of them, the most registers that
    one uses, and how long it took.
    """

    count: int
    opcode: str
    registers: int
    seconds: float


def structure(unit: TranslationUnit, name: str) -> str:
    """Returns the text of a unit's configuration under another name."""
    text = unit.source
    return text[text.index("struct Config") : text.index("QSYNC_")].replace(
        "struct Config", f"struct {name}"
    )


def batches(units: Sequence[TranslationUnit]) -> Iterator[list[TranslationUnit]]:
    """Yields units that can be compiled in one file: of the same headers and formats, looked at for
    the same instruction.
    """

    def kind(unit: TranslationUnit) -> tuple[object, ...]:
        head, *lines = unit.source.splitlines()
        formats = [line for line in lines if line.strip().startswith(("using A =", "using B ="))]
        return (not unit.heavy, unit.arch, unit.interface, unit.opcode, head, *formats)

    served = sorted(
        (unit for unit in units if "struct Config" in unit.source),
        key=kind,
    )
    for _, alike in groupby(served, kind):
        found = list(alike)
        step = TOGETHER[found[0].heavy]
        yield from (found[start : start + step] for start in range(0, len(found), step))


def text(batch: Sequence[TranslationUnit]) -> str:
    """Returns the text of a file with all kernels of a batch."""
    adapter, arguments = ADAPTERS[batch[0].interface]
    lines = [batch[0].source.splitlines()[0]]
    for number, unit in enumerate(batch):
        lines.append(structure(unit, f"Config{number}"))
        lines.append(
            f'extern "C" int run{number}(qsync::{arguments} const *x, void *workspace, '
            "cudaStream_t stream) "
            f"{{ return qsync::{adapter}<Config{number}>::run(*x, workspace, stream); }}\n"
        )
    return "\n".join(lines)


def compiled(batch: Sequence[TranslationUnit]) -> Passed | None:
    """Compiles a batch; returns None where it does not pass."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "batch.cu"), Path(folder, "batch.o")
        source.write_text(text(batch), encoding="utf-8")
        done = subprocess.run(
            command(batch[0], source, code), capture_output=True, text=True, check=False
        )
        report = done.stdout + done.stderr
        if done.returncode or compiler.complaint(report):
            return None
        found = instruction(compiler.listing(code), batch[0].opcode, len(batch))
    return (
        Passed(len(batch), found, compiler.resources(report).registers, time.monotonic() - since)
        if found
        else None
    )


def instruction(listing: str, opcode: str, count: int) -> str:
    """Returns an instruction that begins with `opcode`, if so many functions have one; else ""."""
    functions = map(compiler.instructions, listing.split("Function : ")[1:])
    found = [next((name for name in names if name.startswith(opcode)), "") for names in functions]
    return next(filter(None, found)) if sum(map(bool, found)) >= count else ""


def command(unit: TranslationUnit, source: Path, code: Path) -> list[str]:
    """Returns the command of the unit, made to compile `source` for the device alone: for its
    machine code and no PTX beside it.
    """
    *words, _, _, _ = compiler.command(unit, toolchain.toolchain())
    kept = [
        word
        for word in words
        if word != "-shared" and not word.startswith(("-Xlinker", "-Xcompiler"))
    ]
    kept = [re.sub(r"code=\[(\w+),\w+\]", r"code=\1", word) for word in kept]
    return [*kept, "-cubin", "-o", str(code), str(source)]


def passing(batch: list[TranslationUnit]) -> list[tuple[list[TranslationUnit], Passed]]:
    """Returns the largest halves of halves of a batch that pass."""
    if passed := compiled(batch):
        return [(batch, passed)]
    half = len(batch) // 2
    return (
        [found for part in (batch[:half], batch[half:]) for found in passing(part)] if half else []
    )


def attempt(units: Sequence[TranslationUnit], advance: Advance) -> dict[TranslationUnit, Passed]:
    """Compiles units in batches, side by side, and returns those that passed; what is wrong with
    the others is not said here.

    Args:
        advance: is called with the number of units that are done.
    """
    found: dict[TranslationUnit, Passed] = {}
    jobs = max(1, min(compiler.job_limit(), compiler.available_memory() // MEMORY))
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(passing, batch): batch for batch in batches(units)}
        for future in as_completed(running):
            for part, passed in future.result():
                found |= dict.fromkeys(part, passed)
            advance("", count=len(running[future]))
    return found
