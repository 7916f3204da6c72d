"""Compile and inspect every CUDA kernel; no GPU is needed.

    python tests/support/cuda/compiled/cuda_compile_all.py --arch sm_80 --arch sm_90a --heavy
        --json runs/cuda-compile.json

`make test-cuda-compile` runs it for all architectures of the installed nvcc. Without --heavy,
kernels of CUTLASS 3 are omitted (10 seconds each, and 6 GB per file). --only selects kernels by a
part of their name, and --sample N selects N evenly spaced kernels of each architecture.

Many kernels are compiled in one file, for the device only, and discarded (`cuda_batches`). --each
compiles each kernel into the cache as for users, which is five times slower, but the cache is
reused. The exit status is 1 if a kernel does not compile, fails the checks of
`qsync_fx.backend.cuda.kernel_build.compiler`, or lacks the expected instruction, and if no
disassembler is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsync_fx.backend.cuda import codegen, toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, Arch
from qsync_fx.backend.cuda.selection import candidates
from qsync_fx.errors import QSyncError
from qsync_fx.formats import FORMATS
from qsync_fx.progress import progress
from qsync_fx.serialization.atomic_files import write_text
from tests.support.cuda.compiled import cuda_batches


def units(arch: Arch) -> list[TranslationUnit]:
    """Return all units of an architecture: products, convolutions, quantizers, copies and casts."""
    quantizers = [
        codegen.quantizer(arch, x, fmt)
        for x in codegen.X_TYPES
        for fmt in codegen.QUANTIZER_FORMATS
    ]
    products = map(codegen.unit_of, candidates.all_configs(arch))
    return [
        *products,
        *quantizers,
        codegen.copier(arch),
        *codegen.converters(arch),
    ]


def sampled(of: list[TranslationUnit], count: int | None) -> list[TranslationUnit]:
    """Return evenly spaced units of a list."""
    if count is None or count >= len(of):
        return of
    return [of[index * len(of) // count] for index in range(count)]


def rows_of(chosen: list[TranslationUnit], each: bool) -> list[dict[str, Any]]:
    """Compile units of one architecture and return a row for each."""
    passed: dict[TranslationUnit, cuda_batches.Passed] = {}
    if not each:
        with progress("compiling CUDA kernels", len(chosen)) as advance:
            passed = cuda_batches.attempt(chosen, advance)
    built = compiler.attempt([unit for unit in chosen if unit not in passed])
    return [
        {"name": unit.name, "arch": unit.arch, "wanted": unit.opcode}
        | (together(passed[unit]) if unit in passed else alone(unit, built))
        for unit in chosen
    ]


def together(passed: cuda_batches.Passed) -> dict[str, Any]:
    """Return the row of a unit in a batch, with the batch's registers and its share of the time."""
    return {
        "ok": True,
        "opcode": passed.opcode,
        "together": passed.count,
        "seconds": round(passed.seconds / passed.count, 2),
        "registers": passed.registers,
        "stack": 0,
        "spills": 0,
    }


def alone(unit: TranslationUnit, built: compiler.Built) -> dict[str, Any]:
    """Return the row of a unit that was compiled separately."""
    failure = built.failures.get(unit)
    if failure is not None:
        return {"ok": False, "error": str(failure)}
    entry = kernel_cache.read(built.libraries[unit].parent)
    assert entry is not None
    manifest = entry.manifest
    used = manifest.resources
    return {
        "ok": bool(manifest.opcode) or not unit.opcode,
        "opcode": manifest.opcode,
        "seconds": manifest.seconds,
        "registers": used.registers,
        "shared_memory": used.shared_memory,
        "stack": used.stack,
        "spills": used.spills,
        "bytes": manifest.size,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per architecture, product and first format: kernels, failures, registers,
    seconds.
    """
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    by_length = sorted(FORMATS, key=len, reverse=True)
    for line in rows:
        product, _, rest = line["name"].partition(f"_{line['arch']}")
        # Names of copies contain no format.
        kind = (line["arch"], product, next(filter(rest[1:].startswith, by_length), ""))
        new = dict(zip(("arch", "product", "format"), kind, strict=True))
        group = groups.setdefault(
            kind, new | {"kernels": 0, "failed": 0, "registers": 0, "seconds": 0.0}
        )
        group["kernels"] += 1
        group["failed"] += not line["ok"]
        group["registers"] = max(group["registers"], line.get("registers", 0))
        group["seconds"] = round(group["seconds"] + line.get("seconds", 0.0), 2)
    return list(groups.values())


def show(rows: list[dict[str, Any]]) -> None:
    """Print the summary as a table."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    lines = summary(rows)
    for name in lines[0] if lines else ():
        table.add_column(name, justify="left" if name in ("arch", "product", "format") else "right")
    for line in lines:
        table.add_row(
            *(Text(str(value), "red" if line["failed"] else "") for value in line.values())
        )
    Console().print(table)


def write(path: Path, rows: list[dict[str, Any]], seconds: float) -> None:
    """Replace the file at `path` by the rows, their summary, the compiler and the date."""
    compilers = sorted(
        {compiler.described(toolchain.toolchain()) for arch in {line["arch"] for line in rows}}
    )
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "compilers": compilers,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(seconds),
        "summary": summary(rows),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=ARCHITECTURES,
        help="repeatable; by default all that nvcc has",
    )
    parser.add_argument("--heavy", action="store_true", help="kernels of CUTLASS 3 too")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose names hold this")
    parser.add_argument("--sample", metavar="N", type=int, help="so many of each architecture")
    parser.add_argument(
        "--each", action="store_true", help="each kernel by itself, into the cache, as users get it"
    )
    parser.add_argument(
        "--json", metavar="PATH", type=Path, help="what the table says, and a row for each kernel"
    )
    arguments = parser.parse_args()
    if compiler.disassembler() is None:
        print(
            "no cuobjdump and nvdisasm: nothing can look for instructions; make setup installs "
            "them",
            file=sys.stderr,
        )
        return 1
    rows, since = [], time.monotonic()
    for arch in arguments.arch or ARCHITECTURES:
        try:
            toolchain.toolchain()
        except QSyncError as error:
            print(f"{arch} is left out: {error.what}", file=sys.stderr)
            continue
        wanted = [
            unit
            for unit in units(arch)
            if arguments.only in unit.name and (arguments.heavy or not unit.heavy)
        ]
        chosen = sampled(wanted, arguments.sample)
        rows += rows_of(chosen, arguments.each)
        if arguments.json:
            write(arguments.json, rows, time.monotonic() - since)
    show(rows)
    failed = [line for line in rows if not line["ok"]]
    for line in failed:
        print(
            f"{line['name']}: "
            f"{line.get('error', 'its instruction was not looked for; qsync kernels clear')}",
            file=sys.stderr,
        )
    print(
        f"{len(rows)} kernels, {len(failed)} failed, {time.monotonic() - since:.0f} s",
        file=sys.stderr,
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
