"""`qsync kernels list`, `clear` and `path`: the kernels that are kept.

Invariant: what is listed is what `qsync_fx.backend.cuda.libraries.cache` would load. Nothing is removed outside of the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_fx.cli import output
from qsync_fx.cli.command import Command
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from qsync_fx.backend.cuda.libraries.cache import Entry

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _what_to_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="a folder of kernels; by default the cache and QSYNC_KERNELS_PATH",
    )
    parser.add_argument("--json", action="store_true", help="everything that is known of each, as one JSON list")


def _list(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.libraries import cache

    folders = [arguments.folder] if arguments.folder else [cache.root(), *cache.ahead_of_time()]
    if arguments.folder and not arguments.folder.is_dir():
        raise OptionError(
            "there is no such folder", where=str(arguments.folder), do="qsync kernels path tells the cache's"
        )
    found = [entry for folder in folders for entry in cache.entries(folder)]
    whole = [entry for entry in found if isinstance(entry, cache.Entry)]
    if arguments.json:
        rows = [{"folder": str(entry.folder)} | dataclasses.asdict(entry.manifest) for entry in whole]
        output.as_json(rows)
    elif whole:
        output.show(table_of(whole))
    else:
        output.note(f"no kernels in {', '.join(map(str, folders))}")
    if damaged := len(found) - len(whole):
        output.note(f"{damaged} damaged ones besides, which will be compiled anew")


def table_of(entries: Iterable[Entry]) -> Table:
    """Returns what to know of kernels that are kept, one a line."""
    rows = []
    for entry in entries:
        m = entry.manifest
        sizes = str(m.resources.registers), str(m.resources.shared_memory), m.opcode, f"{m.size / 1024:.0f} KB"
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
    parser.add_argument("--older-than", metavar="AGE", help="only those compiled longer ago: 90m, 12h, 30d or 8w")


def _clear(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.libraries import cache

    seconds = _seconds(arguments.older_than)
    folder = cache.root()
    if not folder.is_dir():
        output.note(f"nothing in {folder}")
        return
    cache.prepare(folder)
    count, size = cache.clear(folder, seconds)
    output.note(f"removed {count} kernels, {size / 2**20:.1f} MB, from {folder}")


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    if not re.fullmatch(r"\d{1,6}[mhdw]", age):
        raise OptionError(
            f"{age!r} is no age", where="--older-than", do="write a number and a unit: 90m, 12h, 30d or 8w"
        )
    return float(int(age[:-1]) * _UNITS[age[-1]])


def _path(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.libraries import cache

    print(cache.root())


LIST = Command("what is kept", _list, _what_to_list, "Lists the kernels that are kept.")
CLEAR = Command("empty the cache", _clear, _what_to_clear, "Removes kernels from the cache; damaged ones always.")
PATH = Command("where the cache is", _path, about="Prints the folder of the cache.")
