"""`qsync docs`: read the documentation in the terminal."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from qsync_fx.cli import output
from qsync_fx.cli.command import Command
from qsync_fx.errors import OptionError, nearest

_INSTALLED = Path(__file__).parents[2] / "docs"
_CHECKOUT = Path(__file__).resolve().parents[3] / "docs"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", nargs="?", help="page to print; without it, pages are listed")


def _docs(arguments: argparse.Namespace) -> None:
    folder = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    pages = {path.stem: path for path in sorted(folder.glob("*.md"))}
    if not arguments.page:
        titles = [(name, _title(path)) for name, path in pages.items()]
        output.show(output.table(("page", "title"), titles))
        return
    name = arguments.page.removesuffix(".md")
    if name not in pages:
        raise OptionError(
            f"there is no page {name[:40]!r}", where="PAGE", do=nearest(name[:40], pages)
        )
    text = re.sub(r"<!--.*?-->\n*", "", pages[name].read_text(encoding="utf-8"))
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(re.sub(r"^```(\w+) [^\n]*$", r"```\1", text, flags=re.MULTILINE)))


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


COMMAND = Command(
    "read the documentation in the terminal",
    _docs,
    _add_arguments,
    examples="examples:\n  qsync docs\n  qsync docs options | less",
)
