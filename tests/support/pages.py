"""Execution of the documentation pages as programs.

The first line of a fenced block determines its use:

    ```python run           code; all such blocks of a page share one namespace;
                            name=train.py is the file name in tracebacks
    ```bash run             shell commands
    ```text output          the output of the previous block
    ```python file=PATH     a new file of the repository
    ```diff file=PATH       changes to a file of the repository: hunks without line numbers,
                            separated by lines of "@@"
    ```python package=PATH  a file of an installed package; another block is its pyproject.toml

Tests generate the text between `<!-- generated: NAME -->` and `<!-- end -->`. The command `python
pages.py PAGE OUTPUTS.json` runs the blocks of a page in its process and writes their outputs.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"(<!-- generated: ([^\n]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Fenced block of a page.

    Attributes:
        language: first word of the first line.
        flags: other words, such as "run".
        values: words with a value, such as "file", by name.
        text: the content.
        start, end: position of the content in the page.
    """

    language: str
    flags: frozenset[str]
    values: Mapping[str, str]
    text: str
    start: int
    end: int

    @property
    def runs(self) -> bool:
        return "run" in self.flags

    @property
    def is_output(self) -> bool:
        return "output" in self.flags


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    result = []
    for match in _FENCE.finditer(page):
        words = match[2].split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        flags = frozenset(word for word in words if "=" not in word)
        result.append(Block(match[1], flags, values, match[3], match.start(3), match.end(3)))
    return result


def apply(page: str, tree: Path) -> None:
    """Apply the files and diffs of a page to a copy of the repository."""
    for block in blocks(page):
        if "file" not in block.values:
            continue
        path = tree / block.values["file"]
        if block.language == "diff":
            path.write_text(patched(path.read_text(), block.text))
        else:
            assert not path.exists(), f"{path} already exists"
            path.write_text(block.text)


def patched(text: str, diff: str) -> str:
    """Return a file's text with the hunks of a diff applied. Each hunk must match exactly once."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = [line or " " for line in hunk.splitlines()]
        assert all(line[0] in " +-" for line in lines), f"not a diff:\n{hunk}"
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert text.count(old) == 1, f"the hunk matches {text.count(old)} times:\n{hunk}"
        text = text.replace(old, new)
    return text


def package(page: str) -> dict[str, str]:
    """Return the files of the package on a page by path; empty if the page has no package."""
    return {
        block.values["package"]: block.text for block in blocks(page) if "package" in block.values
    }


def install(page: str, site: Path) -> None:
    """Install the package of a page into `site`: its modules and its entry points."""
    files = package(page)
    for path, text in files.items():
        (site / path).write_text(text)
    if "pyproject.toml" in files:
        project = tomllib.loads(files["pyproject.toml"])["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project["entry-points"].items()
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
            for group, entries in groups
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))


def with_outputs(page: str, outputs: list[str]) -> str:
    """Return the page with new output blocks; `outputs` has one text per executed block."""
    printed, parts, position = iter(outputs), [], 0
    last = ""
    for block in blocks(page):
        if block.runs:
            last = next(printed)
        elif block.is_output:
            assert last.strip(), (
                f"the block before this output printed nothing:\n{page[: block.start][-300:]}"
            )
            parts += [page[position : block.start], last.strip("\n") + "\n"]
            position = block.end
    return "".join([*parts, page[position:]])


def with_generated(page: str, make: Callable[[str], str]) -> str:
    """Return the page with `make(name)` as the text of each generated part."""
    return _GENERATED.sub(lambda match: f"{match[1]}\n{make(match[2]).strip()}\n\n{match[4]}", page)


def generated(page: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [match[2] for match in _GENERATED.finditer(page)]


def run(page: Path) -> list[str]:
    """Run the blocks of a page in the current folder and return the output of each.

    Exceptions of a block are not caught.
    """
    # Dynamo looks up the globals of compiled code by module name, so the code needs a module.
    module = types.ModuleType("page")
    sys.modules["page"] = module
    outputs = []
    for number, block in enumerate(block for block in blocks(page.read_text()) if block.runs):
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-euc", block.text], stdout=subprocess.PIPE, text=True, check=False
            )
            assert done.returncode == 0, f"status {done.returncode}:\n{block.text}\n{done.stdout}"
            outputs.append(done.stdout)
            continue
        name = block.values.get("name", f"{page.stem}_{number}.py")
        linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, name, "exec"), module.__dict__)
        outputs.append(printed.getvalue())
    return outputs


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(Path(sys.argv[1]))))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
