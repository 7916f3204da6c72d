"""`qsync kernels`: compile CUDA kernels ahead of time; list and clear the kernel cache.

Invariant: the printed kernels are those that `qsync_fx.backend.cuda.kernel_build.kernel_cache`
would load. Only files in the cache are removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import OptionError, nearest
from qsync_fx.formatting import many

if TYPE_CHECKING:
    from rich.table import Table

    from qsync_fx.backend.cuda.codegen import TranslationUnit
    from qsync_fx.backend.cuda.kernel_build.kernel_cache import CacheEntry
    from qsync_fx.backend.cuda.kernel_config import Arch


_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="folder of kernels; by default the cache and the folders of QSYNC_KERNELS_PATH",
    )
    add_options(parser, "--json  print all details of each kernel as one JSON list")


def _list(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    folders = [kernel_cache.root(), *kernel_cache.ahead_of_time()]
    if arguments.folder:
        folders = [arguments.folder]
    if arguments.folder and not arguments.folder.is_dir():
        do = "check the path; qsync kernels path prints the folder of the cache"
        raise OptionError("the folder does not exist", where=str(arguments.folder), do=do)
    result = [entry for folder in folders for entry in kernel_cache.entries(folder)]
    full = [entry for entry in result if isinstance(entry, kernel_cache.CacheEntry)]
    if arguments.json:
        output.as_json([{"folder": str(e.folder), **dataclasses.asdict(e.manifest)} for e in full])
    elif full:
        output.show(table_of(full))
    else:
        output.note(f"no kernels in {', '.join(map(str, folders))}")
    if damaged := len(result) - len(full):
        output.note(f"{many(damaged, 'damaged kernel')} omitted, to be recompiled when needed")


def table_of(entries: Iterable[CacheEntry]) -> Table:
    """Return a table of cached kernels."""
    rows = []
    for entry in entries:
        m = entry.manifest
        registers, shared = str(m.resources.registers), str(m.resources.shared_memory)
        sizes = registers, shared, m.opcode, f"{m.size / 1024:.0f} KB"
        times = f"{m.seconds:.0f} s", _age(time.time() - m.created)
        reason = f"not used: {m.refused}" if m.refused else ""
        rows.append((m.name, m.arch, *sizes, *times, reason))
    names = ("name", "arch", "registers", "shared", "opcode", "size", "compiled in", "age", "")
    return output.table(names, rows, right=("registers", "shared", "size", "compiled in", "age"))


def _age(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _add_clear_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser, "--older-than AGE  remove only kernels older than this, such as 90m, 12h, 30d or 8w"
    )


def _clear(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    seconds = _seconds(arguments.older_than)
    folder = kernel_cache.root()
    if not folder.is_dir():
        output.note(f"the cache is empty: {folder}")
        return
    kernel_cache.prepare(folder)
    count, size = kernel_cache.clear(folder, seconds)
    output.note(f"removed {many(count, 'kernel')}, {size / 2**20:.1f} MB, from {folder}")


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    if not re.fullmatch(r"\d{1,6}[mhdw]", age):
        do = "write a number and a unit: 90m, 12h, 30d or 8w"
        raise OptionError(f"{age!r} is not an age", where="--older-than", do=do)
    return float(int(age[:-1]) * _UNITS[age[-1]])


def _path(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    print(kernel_cache.root())


LIST = Command("list compiled kernels", _list, _add_list_arguments, "Lists compiled kernels.")
CLEAR = Command(
    "clear the cache",
    _clear,
    _add_clear_arguments,
    "Removes kernels from the cache. Damaged kernels are always removed.",
)
PATH = Command("print the folder of the cache", _path, about="Prints the folder of the cache.")


_BUILD_ABOUT = """\
Compiles CUDA kernels. No GPU is needed.

With --model, compiles the kernels that training this model with the given
precision or plan uses; the model may be on the CPU. Without --model, compiles
one kernel for each product and format."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        --arch ARCH...     target architecture, such as sm_80 or sm_90a; repeatable; by default
                           those of this machine's GPUs
        --every-candidate  compile all candidates of the tuner, not only the default kernels
        --jobs N           number of concurrent compilers; by default as cores and memory allow
        --output DIR       folder for the kernels instead of the cache
        """,
        {"jobs": int, "output": Path},
    )
    model_args.add(parser, "--model")


def _build(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache

    architectures = [_arch(name) for name in arguments.arch] or _local_architectures()
    folder = arguments.output and kernel_cache.prepare(arguments.output.absolute())
    units = [unit for arch in architectures for unit in _units(arch, arguments)]
    if not units:
        raise OptionError(
            "no kernel needs to be compiled: torch computes all products of this model",
            where=arguments.model,
            do="use --every-candidate to compile the candidates of the tuner, "
            "--no-skip-unprofitable to quantize layers that are not faster so, or check the "
            "precisions with qsync inspect",
        )
    since = time.monotonic()
    built = compiler.attempt(units, jobs=arguments.jobs, folder=folder)
    entries = [kernel_cache.read(path.parent) for path in built.libraries.values()]
    output.show(table_of(entry for entry in entries if entry is not None))
    seconds, place = time.monotonic() - since, folder or kernel_cache.root()
    output.note(
        f"{many(len(built.libraries), 'kernel')} for {', '.join(architectures)} in {place}, "
        f"{seconds:.0f} s"
    )
    if built.failures:
        first = next(iter(built.failures.values()))
        message = f"{len(built.failures)} of {many(len(units), 'kernel')} could not be compiled"
        message = f"{message}; first error: {first.what}"
        raise type(first)(message, where=first.where, do=first.do)


def _arch(name: str) -> Arch:
    from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES

    for arch in ARCHITECTURES:
        if arch == name:
            return arch
    message = f"there are no kernels for the architecture {name!r}"
    raise OptionError(message, where="--arch", do=nearest(name, ARCHITECTURES))


def _local_architectures() -> list[Arch]:
    import torch

    from qsync_fx.backend.cuda.runtime.device_state import known_of

    result = [
        known_of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count())
    ]
    available = [arch for arch in dict.fromkeys(result) if arch is not None]
    if not available:
        do = "name the target architecture, as in --arch sm_80"
        raise OptionError("this machine has no supported GPU", where="--arch", do=do)
    return available


def _units(arch: Arch, arguments: argparse.Namespace) -> list[TranslationUnit]:
    from qsync_fx.backend.cuda.selection import select

    if arguments.model is None:
        for option in model_args.explicit_options(arguments):
            do = "add --model, or remove the option"
            raise OptionError("the option requires a model", where=model_args.flag(option), do=do)
        return select.of_all(arch)
    from qsync_fx.backend.cuda.runtime.device_state import assumed
    from qsync_fx.backend.operators.layer_kernels import problems_of

    inputs = model_args.read(arguments)
    # Selection depends on the target device of the kernels, not on the device of the model.
    with assumed(arch, on=inputs.device.type):
        return select.of_problems(
            problems_of(inputs.explain().lowered_graphs), arch, arguments.every_candidate
        )


BUILD = Command("compile kernels", _build, _arguments, _BUILD_ABOUT)


_KERNELS_ABOUT = """\
nvcc compiles CUDA kernels on first use and stores them in a cache.

This command compiles kernels ahead of time, for this machine or for a machine
without a compiler, and lists and clears the cache."""

_EXAMPLES = """\
examples:
  qsync kernels build --arch sm_80 --model bert:small --precision int8
  qsync kernels build --arch sm_90a --output kernels
      for another machine, which loads them with QSYNC_KERNELS_PATH=/path/to/kernels
  qsync kernels list --json | jq .[].name
  qsync kernels clear --older-than 30d"""

COMMAND = Command(
    "compile CUDA kernels, list and clear the cache",
    about=_KERNELS_ABOUT,
    examples=_EXAMPLES,
    actions={"build": BUILD, "list": LIST, "clear": CLEAR, "path": PATH},
)
