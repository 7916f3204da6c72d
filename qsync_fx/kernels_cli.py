"""`qsync kernels`: compile CUDA kernels before they are needed, and see and clear what is kept.

Invariant: what this prints is what `qsync_fx.backend.cuda.cache` would load. Nothing is removed outside of the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_fx.errors import KernelError, OptionError
from qsync_fx.options import DOCUMENTED

if TYPE_CHECKING:
    from qsync_fx.backend.cuda.cache import Entry
    from qsync_fx.backend.cuda.config import Arch
    from qsync_fx.backend.cuda.unit import Unit

_ABOUT = """\
CUDA kernels are compiled by nvcc when they are first needed, and kept.

This command compiles them before, for this machine or for one that has no
compiler, and shows and clears what is kept."""

_BUILD = """\
Compiles CUDA kernels. No GPU is needed.

With --model, those that the model's layers need when they are trained in the
precision or by the plan given; MODULE:CALLABLE is as for "qsync inspect", and
the model may be on the CPU. Otherwise one for each product and format."""

_EXAMPLES = """\
examples:
  qsync kernels build --arch sm_80 --model bert:small --precision int8
  qsync kernels build --arch sm_90a --output kernels      to carry elsewhere,
      where QSYNC_KERNELS_PATH=/path/to/kernels finds them
  qsync kernels list --json | jq .[].name
  qsync kernels clear --older-than 30d"""

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add(commands: Any) -> None:
    """Adds `kernels` to the commands of `qsync`."""
    raw = argparse.RawDescriptionHelpFormatter
    kernels = commands.add_parser(
        "kernels",
        help="compile CUDA kernels, see and clear them",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    actions = kernels.add_subparsers(title="what to do", required=True, metavar="ACTION")

    build = actions.add_parser(
        "build", help="compile kernels", description=_BUILD, epilog=_EXAMPLES, formatter_class=raw
    )
    build.set_defaults(run=_build)
    build.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        help="what to compile for, such as sm_80 or sm_90a; repeatable; by default this machine's GPUs",
    )
    build.add_argument("--model", metavar="MODULE:CALLABLE", help="what returns (model, args) or (model, args, kwargs)")
    build.add_argument("--precision", metavar="NAME", help=DOCUMENTED["precision"])
    build.add_argument("--plan", metavar="FILE", help="path of a saved plan, in place of --precision")
    build.add_argument("--scaling", metavar="WHAT", help=DOCUMENTED["scaling"])
    build.add_argument(
        "--every-candidate",
        action="store_true",
        help="all kernels that the tuner may choose from, not only those that run where nothing was tuned",
    )
    build.add_argument(
        "--jobs", metavar="N", type=int, help="how many compilers run at once; by default as cores and memory allow"
    )
    build.add_argument("--output", metavar="DIR", type=Path, help="folder to keep them in, in place of the cache")

    show = actions.add_parser("list", help="what is kept", description="Lists the kernels that are kept.")
    show.set_defaults(run=_list)
    show.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="a folder of kernels; by default the cache and QSYNC_KERNELS_PATH",
    )
    show.add_argument("--json", action="store_true", help="everything that is known of each, as one JSON list")

    clear = actions.add_parser(
        "clear", help="empty the cache", description="Removes kernels from the cache; damaged ones always."
    )
    clear.set_defaults(run=_clear)
    clear.add_argument("--older-than", metavar="AGE", help="only those compiled longer ago: 90m, 12h, 30d or 8w")

    path = actions.add_parser("path", help="where the cache is", description="Prints the folder of the cache.")
    path.set_defaults(run=_path)


def _build(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda import cache, compiler

    architectures = [_arch(name) for name in arguments.arch] if arguments.arch else _own_architectures()
    folder = None if arguments.output is None else cache.prepare(arguments.output.absolute())
    units = [unit for arch in architectures for unit in _units(arch, arguments)]
    if not units:
        raise OptionError(
            "there is nothing to compile: torch computes all products of this model",
            where=arguments.model,
            do="--every-candidate compiles what the tuner may choose from; see qsync inspect for the precisions",
        )
    since = time.monotonic()
    built = compiler.attempt(units, jobs=arguments.jobs, folder=folder)
    entries = [cache.read(path.parent) for path in built.libraries.values()]
    _print_table(entry for entry in entries if entry is not None)
    place = folder or cache.root()
    print(
        f"qsync: {len(built.libraries)} kernels for {', '.join(architectures)} in {place}, {time.monotonic() - since:.0f} s",
        file=sys.stderr,
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
    from qsync_fx.backend.cuda.config import ARCHITECTURES
    from qsync_fx.errors import nearest

    for arch in ARCHITECTURES:
        if arch == name:
            return arch
    raise OptionError(
        f"{name!r} is no architecture that there are kernels for", where="--arch", do=nearest(name, ARCHITECTURES)
    )


def _own_architectures() -> list[Arch]:
    import torch

    from qsync_fx.backend.cuda.device import known_of

    found = [known_of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count())]
    known = [arch for arch in dict.fromkeys(found) if arch is not None]
    if not known:
        raise OptionError(
            "this machine has no GPU that there are kernels for",
            where="--arch",
            do="say what to compile for, as in --arch sm_80",
        )
    return known


def _units(arch: Arch, arguments: argparse.Namespace) -> list[Unit]:
    from qsync_fx.backend.cuda import ahead

    named = {
        name: value for name in ("precision", "plan", "scaling") if (value := getattr(arguments, name)) is not None
    }
    if arguments.model is None:
        for name in named:
            raise OptionError(
                "without a model there is nothing to give precisions to", where=f"--{name}", do="name one with --model"
            )
        return ahead.of_all(arch)
    import torch

    from qsync_fx.backend.cuda.collect import problems_of
    from qsync_fx.backend.cuda.device import assumed
    from qsync_fx.explanation import explain
    from qsync_fx.model_reference import load

    model, args, kwargs = load(arguments.model)
    # Wherever the model lies, what decides is the device that the kernels are for.
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
    with assumed(arch, on=next((parameter.device.type for parameter in parameters), "cpu")):
        problems = problems_of(explain(model, *args, options=named, **kwargs))
        return ahead.of_problems(problems, arch, arguments.every_candidate)


def _list(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda import cache

    folders = [arguments.folder] if arguments.folder else [cache.root(), *cache.ahead_of_time()]
    if arguments.folder and not arguments.folder.is_dir():
        raise OptionError(
            "there is no such folder", where=str(arguments.folder), do="qsync kernels path tells the cache's"
        )
    found = [entry for folder in folders for entry in cache.entries(folder)]
    whole = [entry for entry in found if isinstance(entry, cache.Entry)]
    if arguments.json:
        rows = [{"folder": str(entry.folder)} | dataclasses.asdict(entry.manifest) for entry in whole]
        print(json.dumps(rows, indent=2))
    elif whole:
        _print_table(whole)
    else:
        print(f"qsync: no kernels in {', '.join(map(str, folders))}", file=sys.stderr)
    if damaged := len(found) - len(whole):
        print(f"qsync: {damaged} damaged ones besides, which will be compiled anew", file=sys.stderr)


def _print_table(entries: Iterable[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from qsync_fx.report.console import console

    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("name", "arch", "registers", "shared", "opcode", "size", "compiled in", "age", ""):
        right = name in ("registers", "shared", "size", "compiled in", "age")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for entry in entries:
        m = entry.manifest
        cells = (
            m.name,
            m.arch,
            str(m.resources.registers),
            f"{m.resources.shared_memory}",
            m.opcode,
            f"{m.size / 1024:.0f} KB",
        )
        times = (f"{m.seconds:.0f} s", _age(time.time() - m.created))
        table.add_row(*map(Text, (*cells, *times, f"not used: {m.refused}" if m.refused else "")))
    console().print(table)


def _age(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _clear(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda import cache

    seconds = _seconds(arguments.older_than)
    folder = cache.root()
    if not folder.is_dir():
        print(f"qsync: nothing in {folder}", file=sys.stderr)
        return
    cache.prepare(folder)
    count, size = cache.clear(folder, seconds)
    print(f"qsync: removed {count} kernels, {size / 2**20:.1f} MB, from {folder}", file=sys.stderr)


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    if not re.fullmatch(r"\d{1,6}[mhdw]", age):
        raise OptionError(
            f"{age!r} is no age", where="--older-than", do="write a number and a unit: 90m, 12h, 30d or 8w"
        )
    return float(int(age[:-1]) * _UNITS[age[-1]])


def _path(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda import cache

    print(cache.root())
