"""`qsync kernels`: compile CUDA kernels ahead of time; list and clear the kernel cache.

Invariant: the printed kernels are those that `qsync_fx.backend.cuda.kernel_build.kernel_cache`
would load. Only files in the cache are removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command
from qsync_fx.errors import KernelError, OptionError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from qsync_fx.backend.cuda.codegen import TranslationUnit
    from qsync_fx.backend.cuda.kernel_build.kernel_cache import CacheEntry
    from qsync_fx.backend.cuda.kernel_config import Arch


_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _what_to_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="a folder of kernels; by default the cache and QSYNC_KERNELS_PATH",
    )
    parser.add_argument(
        "--json", action="store_true", help="everything that is known of each, as one JSON list"
    )


def _list(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    folders = (
        [arguments.folder]
        if arguments.folder
        else [kernel_cache.root(), *kernel_cache.ahead_of_time()]
    )
    if arguments.folder and not arguments.folder.is_dir():
        raise OptionError(
            "there is no such folder",
            where=str(arguments.folder),
            do="qsync kernels path tells the cache's",
        )
    result = [entry for folder in folders for entry in kernel_cache.entries(folder)]
    full = [entry for entry in result if isinstance(entry, kernel_cache.CacheEntry)]
    if arguments.json:
        rows = [
            {"folder": str(entry.folder)} | dataclasses.asdict(entry.manifest) for entry in full
        ]
        output.as_json(rows)
    elif full:
        output.show(table_of(full))
    else:
        output.note(f"no kernels in {', '.join(map(str, folders))}")
    if damaged := len(result) - len(full):
        output.note(f"{damaged} damaged ones besides, which will be compiled anew")


def table_of(entries: Iterable[CacheEntry]) -> Table:
    """Return a table of cached kernels."""
    rows = []
    for entry in entries:
        m = entry.manifest
        sizes = (
            str(m.resources.registers),
            str(m.resources.shared_memory),
            m.opcode,
            f"{m.size / 1024:.0f} KB",
        )
        times = f"{m.seconds:.0f} s", _age(time.time() - m.created)
        rows.append((m.name, m.arch, *sizes, *times, f"not used: {m.refused}" if m.refused else ""))
    names = ("name", "arch", "registers", "shared", "opcode", "size", "compiled in", "age", "")
    return output.table(names, rows, right=("registers", "shared", "size", "compiled in", "age"))


def _age(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _what_to_clear(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than", metavar="AGE", help="only those compiled longer ago: 90m, 12h, 30d or 8w"
    )


def _clear(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    seconds = _seconds(arguments.older_than)
    folder = kernel_cache.root()
    if not folder.is_dir():
        output.note(f"nothing in {folder}")
        return
    kernel_cache.prepare(folder)
    count, size = kernel_cache.clear(folder, seconds)
    output.note(f"removed {count} kernels, {size / 2**20:.1f} MB, from {folder}")


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    if not re.fullmatch(r"\d{1,6}[mhdw]", age):
        raise OptionError(
            f"{age!r} is no age",
            where="--older-than",
            do="write a number and a unit: 90m, 12h, 30d or 8w",
        )
    return float(int(age[:-1]) * _UNITS[age[-1]])


def _path(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import kernel_cache

    print(kernel_cache.root())


LIST = Command("what is kept", _list, _what_to_list, "Lists the kernels that are kept.")
CLEAR = Command(
    "empty the cache",
    _clear,
    _what_to_clear,
    "Removes kernels from the cache; damaged ones always.",
)
PATH = Command("where the cache is", _path, about="Prints the folder of the cache.")


_BUILD_ABOUT = """\
Compiles CUDA kernels. No GPU is needed.

With --model, those that the model's layers need when they are trained in the
precision or by the plan given; the model may be on the CPU. Otherwise one for
each product and format."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        help="what to compile for, such as sm_80 or sm_90a; repeatable; by default this machine's GPUs",
    )
    parser.add_argument(
        "--every-candidate",
        action="store_true",
        help="all kernels that the tuner may choose from, not only those that run where nothing was tuned",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="how many compilers run at once; by default as cores and memory allow",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="folder to keep them in, in place of the cache"
    )
    model_args.add(parser, "--model")


def _build(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.kernel_build import compiler, kernel_cache

    architectures = (
        [_arch(name) for name in arguments.arch] if arguments.arch else _own_architectures()
    )
    folder = None if arguments.output is None else kernel_cache.prepare(arguments.output.absolute())
    units = [unit for arch in architectures for unit in _units(arch, arguments)]
    if not units:
        raise OptionError(
            "there is nothing to compile: torch computes all products of this model",
            where=arguments.model,
            do="--every-candidate compiles what the tuner may choose from; see qsync inspect for the precisions",
        )
    since = time.monotonic()
    built = compiler.attempt(units, jobs=arguments.jobs, folder=folder)
    entries = [kernel_cache.read(path.parent) for path in built.libraries.values()]
    output.show(table_of(entry for entry in entries if entry is not None))
    seconds, place = time.monotonic() - since, folder or kernel_cache.root()
    output.note(
        f"{len(built.libraries)} kernels for {', '.join(architectures)} in {place}, {seconds:.0f} s"
    )
    if built.failures:
        raise _failed(list(built.failures.values()), len(units))


def _failed(failures: Sequence[KernelError], total: int) -> KernelError:
    first = failures[0]
    if len(failures) == 1 and total == 1:
        return first
    return type(first)(
        f"{len(failures)} of {total} kernels could not be compiled; the first: {first.what}",
        where=first.where,
        do=first.do,
    )


def _arch(name: str) -> Arch:
    from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES

    for arch in ARCHITECTURES:
        if arch == name:
            return arch
    raise OptionError(
        f"{name!r} is no architecture that there are kernels for",
        where="--arch",
        do=nearest(name, ARCHITECTURES),
    )


def _own_architectures() -> list[Arch]:
    import torch

    from qsync_fx.backend.cuda.runtime.device_state import known_of

    result = [
        known_of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count())
    ]
    available = [arch for arch in dict.fromkeys(result) if arch is not None]
    if not available:
        raise OptionError(
            "this machine has no GPU that there are kernels for",
            where="--arch",
            do="say what to compile for, as in --arch sm_80",
        )
    return available


def _units(arch: Arch, arguments: argparse.Namespace) -> list[TranslationUnit]:
    from qsync_fx.backend.cuda.selection import candidates

    if arguments.model is None:
        for option in model_args.given(arguments):
            raise OptionError(
                "without a model there is nothing to train so",
                where=model_args.flag(option),
                do="name one with --model",
            )
        return candidates.of_all(arch)
    from qsync_fx.backend.cuda.runtime.device_state import assumed
    from qsync_fx.backend.operators.gemm.precompile_problems import problems_of

    inputs = model_args.read(arguments)
    # Selection depends on the target device of the kernels, not on the device of the model.
    with assumed(arch, on=inputs.device.type):
        return candidates.of_problems(
            problems_of(inputs.explain().lowered_graphs), arch, arguments.every_candidate
        )


BUILD = Command("compile kernels", _build, _arguments, _BUILD_ABOUT)


_KERNELS_ABOUT = """\
CUDA kernels are compiled by nvcc when they are first needed, and kept.

This command compiles them before, for this machine or for one that has no
compiler, and shows and clears what is kept."""

_EXAMPLES = """\
examples:
  qsync kernels build --arch sm_80 --model bert:small --precision int8
  qsync kernels build --arch sm_90a --output kernels      to carry elsewhere,
      where QSYNC_KERNELS_PATH=/path/to/kernels finds them
  qsync kernels list --json | jq .[].name
  qsync kernels clear --older-than 30d"""

COMMAND = Command(
    "compile CUDA kernels, see and clear them",
    about=_KERNELS_ABOUT,
    examples=_EXAMPLES,
    actions={"build": BUILD, "list": LIST, "clear": CLEAR, "path": PATH},
)
