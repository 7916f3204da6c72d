"""Compile many kernels in one file to inspect them, because CUTLASS headers dominate compile time.

Invariant: a batch passes only if each kernel does: ptxas reports no problem, and the functions with
the expected instruction are as many as the kernels. A failed batch is halved to find the failing
kernels.
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
"""Number of CUTLASS 3 (heavy) kernels and of other kernels per file."""

MEMORY = 6_500_000_000
"""Bytes of memory that nvcc needs for eight heavy kernels, measured with nvcc 13.0."""

ADAPTERS = {"gemm": ("Gemm", "GemmArguments"), "conv": ("Conv", "ConvArguments")}
"""Template that instantiates a kernel, and its argument structure, by interface of the unit."""


@dataclass(frozen=True)
class Passed:
    """Batch whose kernels all passed: number, instruction, maximum registers, seconds."""

    count: int
    opcode: str
    registers: int
    seconds: float


def structure(unit: TranslationUnit, name: str) -> str:
    """Return the source of a unit's configuration under another name."""
    text = unit.source
    return text[text.index("struct Config") : text.index("QSYNC_")].replace(
        "struct Config", f"struct {name}"
    )


def batches(units: Sequence[TranslationUnit]) -> Iterator[list[TranslationUnit]]:
    """Yield groups of units for one file: equal headers, formats and expected instruction."""

    def kind(unit: TranslationUnit) -> tuple[object, ...]:
        head, *lines = unit.source.splitlines()
        formats = [line for line in lines if line.strip().startswith(("using A =", "using B ="))]
        return (not unit.heavy, unit.arch, unit.interface, unit.opcode, head, *formats)

    served = sorted(
        (unit for unit in units if "struct Config" in unit.source),
        key=kind,
    )
    for _, group in groupby(served, kind):
        members = list(group)
        step = TOGETHER[members[0].heavy]
        yield from (members[start : start + step] for start in range(0, len(members), step))


def text(batch: Sequence[TranslationUnit]) -> str:
    """Return the source of a file with all kernels of a batch."""
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
    """Compile a batch; return None if it does not pass."""
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
        opcode = instruction(compiler.listing(code), batch[0].opcode, len(batch))
    return (
        Passed(len(batch), opcode, compiler.resources(report).registers, time.monotonic() - since)
        if opcode
        else None
    )


def instruction(listing: str, opcode: str, count: int) -> str:
    """Return an instruction that begins with `opcode` if `count` functions contain one, else ""."""
    functions = map(compiler.instructions, listing.split("Function : ")[1:])
    matches = [next((name for name in names if name.startswith(opcode)), "") for names in functions]
    return next(filter(None, matches)) if sum(map(bool, matches)) >= count else ""


def command(unit: TranslationUnit, source: Path, code: Path) -> list[str]:
    """Return the unit's command to compile `source` to device code without PTX."""
    *words, _, _, _ = compiler.command(unit, toolchain.toolchain())
    options = [
        word
        for word in words
        if word != "-shared" and not word.startswith(("-Xlinker", "-Xcompiler"))
    ]
    options = [re.sub(r"code=\[(\w+),\w+\]", r"code=\1", word) for word in options]
    return [*options, "-cubin", "-o", str(code), str(source)]


def passing(batch: list[TranslationUnit]) -> list[tuple[list[TranslationUnit], Passed]]:
    """Return the largest parts of a batch that pass, by repeated halving."""
    if passed := compiled(batch):
        return [(batch, passed)]
    half = len(batch) // 2
    return (
        [result for part in (batch[:half], batch[half:]) for result in passing(part)]
        if half
        else []
    )


def attempt(units: Sequence[TranslationUnit], advance: Advance) -> dict[TranslationUnit, Passed]:
    """Compile units in concurrent batches and return those that passed.

    Errors of the others are not reported here.

    Args:
        advance: called with the number of completed units.
    """
    results: dict[TranslationUnit, Passed] = {}
    jobs = max(1, min(compiler.job_limit(), compiler.available_memory() // MEMORY))
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(passing, batch): batch for batch in batches(units)}
        for future in as_completed(running):
            for part, passed in future.result():
                results |= dict.fromkeys(part, passed)
            advance("", count=len(running[future]))
    return results
