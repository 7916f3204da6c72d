"""Kernels by the compiler of CUDA 12 beside this machine's nvcc: do they compile, and does either
spill registers where the other does not?

    QSYNC_NVRTC=.cuda12 python tests/support/cuda/cuda_compile_twelve.py --sample 6 --json
    runs/cuda-12.json

`make test-cuda-12` brings that compiler, by pip: NVRTC, since no wheel of CUDA 12 holds nvcc. It
takes what has no host code, which is the
matrix products: of each kind (format, layout, order of tiles) of sm_75 and sm_80 the first
    candidates. The status is 1 where one does not compile, spills, keeps values on the stack or
    lacks its instruction under CUDA 12; where nvcc refuses it as well, the next one would be taken
    under both, and that is told and no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsync_fx.backend.cuda import toolchain, toolchain as nvrtc, toolchain as nvrtc_compile
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import jobs, kernel_registry, sass
from qsync_fx.backend.cuda.kernel_build.kernel_cache import TEMPLATES
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.selection.candidates_gemm import gemm_configs
from qsync_fx.errors import QSyncError
from qsync_fx.serialization.atomic_files import write_text
from tests.support.cuda.compiled import cuda_batches

ARCHITECTURES: tuple[Arch, ...] = ("sm_75", "sm_80")
LAUNCHED, BARE = '#include "gemm/gemm_sm75_sm89.cuh"', '#include "gemm/gemm_sm70.cuh"'
"""What a product includes, and the same kernel without who launches it, which NVRTC takes."""


@dataclass(frozen=True)
class Twelve:
    """What CUDA 12 made of a kernel: `wrong` says why it must not be used, "" where nothing is."""

    registers: int
    spills: int
    wrong: str
    seconds: float


def sample(arch: Arch, count: int) -> list[TranslationUnit]:
    """Returns so many products of an architecture, as different as there are: one of each kind
    first, then the next of each.
    """
    kinds: dict[tuple[object, ...], list[TranslationUnit]] = {}
    for config in gemm_configs(arch):
        kind = config.a, config.unit, config.a_major, config.b_major, config.order
        kinds.setdefault(kind, []).append(kernel_registry.unit_of(config))
    by_turns = chain.from_iterable(zip_longest(*kinds.values()))
    every = [unit for unit in by_turns if unit is not None]
    # Evenly over the kinds where there are more of those than are asked for.
    return (
        [every[at * len(kinds) // count] for at in range(count)]
        if count < len(kinds)
        else every[:count]
    )


def by_twelve(unit: TranslationUnit, tools: nvrtc.Nvrtc, templates: tuple[Path, ...]) -> Twelve:
    """Compiles a product by NVRTC and looks at what comes out."""
    folders = [str(folder) for folder in (TEMPLATES, *templates, *tools.folders)]
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        assert LAUNCHED in unit.source, unit.name
        Path(f"{unit.name}.cu").write_text(unit.source.replace(LAUNCHED, BARE), encoding="utf-8")
        try:
            code, report = nvrtc_compile.machine_code(
                str(tools.library.path), unit.name, unit.arch, folders
            )
        except nvrtc_compile.Failed as error:
            return Twelve(
                0, 0, f"it does not compile: {str(error)[-2000:]}", time.monotonic() - since
            )
        cubin = Path(f"{unit.name}.o")
        cubin.write_bytes(code)
        used, wrong = sass.resources(report), sass.complaint(report)
        if not wrong and not cuda_batches.instruction(sass.listing(cubin), unit.opcode, 1):
            wrong = f"no {unit.opcode} in its machine code"
    return Twelve(used.registers, used.spills, wrong, time.monotonic() - since)


def row_of(
    unit: TranslationUnit, tools: nvrtc.Nvrtc, templates: tuple[Path, ...]
) -> dict[str, Any]:
    """Compiles a product by both, and returns what is told of it."""
    twelve, here = by_twelve(unit, tools, templates), cuda_batches.compiled([unit])
    return {
        "name": unit.name,
        "arch": unit.arch,
        "registers, CUDA 12": twelve.registers,
        "registers, nvcc": None if here is None else here.registers,
        "spills, CUDA 12": twelve.spills,
        "refused by nvcc": here is None,
        "wrong": twelve.wrong,
        "failed": bool(twelve.wrong) and here is not None,
        "seconds": round(twelve.seconds, 2),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a row for each kernel."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    names = [name for name in rows[0] if name not in ("arch", "failed")]
    for name in names:
        table.add_column(name, justify="left" if name in ("name", "wrong") else "right")
    for row in rows:
        table.add_row(*(Text(str(row[name]), "red" if row["failed"] else "") for name in names))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample",
        metavar="N",
        type=int,
        default=6,
        help="so many of each architecture, 6 by default",
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="what the table says")
    arguments = parser.parse_args()
    if sass.disassembler() is None:
        print(
            "no cuobjdump and nvdisasm: nothing can look for instructions; make setup installs "
            "them",
            file=sys.stderr,
        )
        return 1
    try:
        twelve, here = nvrtc.nvrtc(), toolchain.toolchain("sm_80")
    except QSyncError as error:
        print(error, file=sys.stderr)
        return 1
    units = [unit for arch in ARCHITECTURES for unit in sample(arch, arguments.sample)]
    rows = [row_of(unit, twelve, here.cutlass.folders) for unit in units]
    show(rows)
    if arguments.json:
        compilers = [f"NVRTC {toolchain.dotted(twelve.library.version)}", jobs.described(here)]
        content = {"compilers": compilers, "cores": len(os.sched_getaffinity(0)), "rows": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.json, json.dumps(content, indent=1) + "\n")
    failed = [row for row in rows if row["failed"]]
    more = sum(row["registers, CUDA 12"] > (row["registers, nvcc"] or 255) for row in rows)
    print(
        f"{len(rows)} kernels, {len(failed)} failed under CUDA 12; {more} take more registers "
        "there",
        file=sys.stderr,
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
