"""Documentation: code, outputs, generated tables, links, and the files that how-to pages change.

`QSYNC_UPDATE_DOCS=1 pytest tests/test_docs.py` writes changed outputs and tables. Review the diff
before you commit it. Outputs come from a CPU with INT8 and BF16 units. Other CPUs run the code, but
neither write nor compare outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.cli import commands
from qsync_fx.devices import Support, support
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.option_help import DOCUMENTED, RECIPES
from qsync_fx.options import Options
from tests.support import communication_tables, compatibility, experiment_tables, pages, tiers
from tests.support.cuda import cuda_tables
from tests.support.processes import forks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.stem: path for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
OPTIONS = ("options", "options-performance")
"""Pages with a section for each option."""
MOST_LINES = 300
NEEDS = dict.fromkeys(
    ("integrations", "howto-batches"), ("accelerate", "lightning", "transformers")
)
FILES_TO_TOUCH = {
    "howto-format": 1,
    "howto-operator": 2,
    "howto-pass": 3,
    "howto-verb": 1,
    "howto-device": 1,
    "howto-codec": 1,
    "howto-indicator": 1,
    "howto-allocator": 1,
    "howto-objective": 1,
}
PINNED = re.findall(
    r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
)[0]
OUR_VERBS = sorted(commands.names())
UPDATE = bool(os.environ.get("QSYNC_UPDATE_DOCS"))


def parameters(names: Iterable[str]) -> list[Any]:
    """Return pages with their tier; "passes" compiles no model, so it runs in every tier."""
    return [pytest.param(name, marks=() if name == "passes" else tiers.ALL) for name in names]


# Pages that change the tree run in a copy of it. The import hook of an editable install has priority
# over PYTHONPATH and would import the original tree.
_NOT_THE_INSTALLED = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


def update_or_compare(path: Path, expected: str) -> None:
    if UPDATE:
        path.write_text(expected)
    assert path.read_text() == expected, (
        f"{path.name} is out of date; QSYNC_UPDATE_DOCS=1 pytest tests/test_docs.py writes it"
    )


def run(
    path: Path, folder: Path, scratch: Path, pythonpath: tuple[Path, ...] = (), tree: bool = False
) -> None:
    """Run a page in a new process and compare its outputs.

    Commands in its shell blocks are forks of a server. With `tree`, the server imports from
    `pythonpath`.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, pythonpath))
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment["HF_HUB_OFFLINE"] = "1"
    # Each page has its own cache of profiles.
    environment |= {"QSYNC_CACHED_PLAN": "1", "QSYNC_CACHE_DIR": str(scratch / "cache")}
    outputs = scratch / "outputs.json"
    log, script, arguments = scratch / "log", Path(pages.__file__), [str(path), str(outputs)]
    with (
        forks.own(environment)
        if tree
        else contextlib.nullcontext(forks.server(environment)) as forked
    ):
        status = forks.run(script, arguments, forked.shell(environment), log, folder, forked)
    assert status == 0, f"{path.name} does not run:\n{log.read_text()}"
    if torch.__version__.partition("+")[0] == PINNED and computes_natively():
        # Other versions of torch may print the same graph differently.
        update_or_compare(
            path, pages.with_outputs(path.read_text(), json.loads(outputs.read_text()))
        )


def computes_natively() -> bool:
    """Return whether this CPU has INT8 and BF16 units, as the CPU of the printed outputs has."""
    cpu = torch.device("cpu")
    return all(support(cpu, FORMATS[name]).kind == "native" for name in ("int8", "bf16"))


# Pages compile without caches, possibly on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", parameters(name for name in PAGES if name not in FILES_TO_TOUCH))
def test_page_runs(name: str, tmp_path: Path) -> None:
    if missing := [
        package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None
    ]:
        pytest.skip(f"{', '.join(missing)} not installed")
    folder = tmp_path / "folder"
    site, package = (
        folder / "site",
        folder / "package",
    )  # a page that shows a package builds and installs it
    for made in (folder, site, package):
        made.mkdir()
    for path, text in pages.package(PAGES[name].read_text()).items():
        (package / path).write_text(text)
    run(PAGES[name], folder, tmp_path, (site,))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", parameters(FILES_TO_TOUCH))
def test_howto_runs_and_touches_no_more_files(name: str, tmp_path: Path) -> None:
    tree, boot, site = tmp_path / "tree", tmp_path / "boot", tmp_path / "site"
    copy_tree(tree)
    boot.mkdir()
    site.mkdir()
    (boot / "sitecustomize.py").write_text(_NOT_THE_INSTALLED)
    native = importlib.util.find_spec("qsync_fx._C")
    assert native is not None and native.origin is not None
    shutil.copy(native.origin, tree / "qsync_fx")
    before = contents(tree)
    page = PAGES[name].read_text()
    pages.apply(page, tree)
    pages.install(page, site)
    run(PAGES[name], tree, tmp_path, (boot, site, tree), tree=True)
    after = contents(tree)
    touched = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert len(touched) == FILES_TO_TOUCH[name], (
        f"the page changes {sorted(touched)} instead of {FILES_TO_TOUCH[name]} files"
    )


def copy_tree(to: Path) -> None:
    """Copy the files of a build and a test run; symbolic links stay relative links."""
    to.mkdir()
    for name in ("qsync_fx", "passes", "backend", "tests"):
        # Copy bytecode, which is valid for equal file times, except files that are being written.
        shutil.copytree(
            ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("*.pyc.*", "*.so")
        )
    shutil.copy(ROOT / "pyproject.toml", to)


def contents(tree: Path) -> dict[str, bytes]:
    """Return the content of each file that a commit would include, by path."""
    made_by_tools = {"__pycache__", ".pytest_cache", ".hypothesis"}
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file()
        and not made_by_tools & set(path.relative_to(tree).parts)
        and path.suffix != ".so"
    }


def test_every_block_of_python_is_used() -> None:
    for path in PAGES.values():
        for block in pages.blocks(path.read_text()):
            used = block.runs or {"file", "package"} & block.values.keys()
            assert used or block.language != "python", (
                f"{path.name} has a Python block that is never executed:\n{block.text}"
            )


def test_links_lead_somewhere() -> None:
    for path in PAGES.values():
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if file.startswith(("http:", "https:")):
                continue
            linked = path.parent / file if file else path
            assert linked.exists(), f"{path.name} links to {target}, which does not exist"
            anchors = (
                {
                    re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                    for title in headings(linked)
                }
                if anchor
                else {""}
            )
            assert anchor in anchors, (
                f"{path.name} links to {target}, and {linked.name} has no such heading"
            )


def test_links_to_code_are_called_like_the_file() -> None:
    source = r"[^\])#\s]+\.(?:py|cpp|h|cuh)"
    for path in PAGES.values():
        for label, target in re.findall(rf"\[({source})\]\(({source})\)", path.read_text()):
            assert Path(label).name == Path(target).name, (
                f"{path.name}: the label {label} links to {target}"
            )


def headings(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        target
        for path in PAGES.values()
        for target in re.findall(r"(?:^|`)make ([\w-]+)", path.read_text(), re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


# Tables.


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES.values() if pages.generated(path.read_text())],
    ids=lambda path: path.stem,
)
def test_tables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> str:
        tables = {
            "options": options,
            "recipes": recipes,
            "formats": formats,
            "devices": lambda: devices(monkeypatch),
            "verbs": verbs,
            "compatibility": compatibility.table,
        } | cuda_tables.TABLES
        rows = {**tables, **experiment_tables.TABLES, **communication_tables.TABLES}[name]()
        if UPDATE or name not in ("formats", "devices"):
            return rows
        # A new format changes one file only: a page may lack its row, but not have wrong rows.
        shown = set(path.read_text().splitlines())
        return "\n".join(line for line in rows.splitlines() if line in shown)

    update_or_compare(path, pages.with_generated(path.read_text(), make))


def options() -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}

    def default(name: str) -> str:
        value = defaults[name]
        return (
            "none"
            if value is None
            else f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"
        )

    rows = (
        (f"[`{name}`]({page_of_option(name)}#{name})", default(name), text)
        for name, text in DOCUMENTED.items()
    )
    return pages.markdown(("option", "default", "meaning"), rows)


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a page by title."""
    text = PAGES[page].read_text()
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def page_of_option(name: str) -> str:
    """Return the file that describes an option, as a link from the first page of options."""
    (page,) = (page for page in OPTIONS if name in sections_of(page))
    return "" if page == OPTIONS[0] else f"{page}.md"


def verbs() -> str:
    rows = ((f"[`qsync {name}`](cli/{name}.md)", commands.load(name).help) for name in OUR_VERBS)
    return pages.markdown(("verb", "purpose"), rows)


def help_of(*verb: str) -> str:
    """Return the help text of a verb as a block of Markdown."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "qsync_fx.cli", *verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return "```text\n" + "\n".join(map(str.rstrip, done.stdout.splitlines())) + "\n```"


def page_of_verb(name: str) -> str:
    command = commands.load(name)
    if not command.actions:
        return f"# qsync {name}\n\n{help_of(name)}\n"
    sections = (
        f"## qsync {name} {action}\n\n{help_of(name, action)}\n" for action in command.actions
    )
    return "\n".join((f"# qsync {name}\n\nThe verb can {command.help}.\n", *sections))


@pytest.mark.parametrize("name", OUR_VERBS)
def test_page_of_verb(name: str) -> None:
    update_or_compare(DOCS / "cli" / f"{name}.md", page_of_verb(name))


def test_each_page_of_a_verb_has_its_verb() -> None:
    assert {path.stem for path in (DOCS / "cli").glob("*.md")} == set(OUR_VERBS)


def test_pages_are_short() -> None:
    lines = {
        path: len(path.read_text().splitlines()) for path in [*PAGES.values(), *DOCS.glob("*/*.md")]
    }
    assert {path.name: count for path, count in lines.items() if count > MOST_LINES} == {}


def recipes() -> str:
    def in_words(settings: Mapping[str, object]) -> str:
        return ", ".join(f"`{name}={value!r}`" for name, value in settings.items())

    rows = (
        (f"`{name}`", in_words(recipe.options), recipe.trade_off)
        for name, recipe in RECIPES.items()
    )
    return pages.markdown(("recipe", "options", "trade-off"), rows)


def formats() -> str:
    def row(fmt: Precision) -> tuple[str, ...]:
        largest = f"{fmt.max:.8g}"
        kind = "integer" if fmt.kind == "integer" else f"float, {fmt.mantissa} bits of mantissa"
        stored = str(fmt.dtype).removeprefix("torch.") + (" and a scale" if fmt.scaled else "")
        return (
            f"`{fmt.name}`",
            str(fmt.bits),
            kind,
            largest,
            stored,
            *map(str, (fmt.output, fmt.gradient, fmt.elsewhere)),
        )

    head = (
        "format",
        "bits",
        "kind",
        "largest",
        "stored as",
        "output",
        "gradient rounded to",
        "substitute",
    )
    return pages.markdown(head, map(row, FORMATS.values()))


def devices(monkeypatch: pytest.MonkeyPatch) -> str:
    def on_cpu(fmt: Precision, units: bool) -> Support:
        with monkeypatch.context() as patch:
            patch.setattr("qsync_fx.devices.format_support.native_bf16_unit", lambda: units)
            patch.setattr("qsync_fx.devices.format_support.cpu_multiplies_integers", lambda: units)
            patch.setattr("qsync_fx.devices.format_support.native_integer_unit", lambda: units)
            patch.setattr("qsync_fx.devices.format_support.native_integer_products", lambda: units)
            return support.__wrapped__(torch.device("cpu"), fmt)

    def on_cuda(fmt: Precision) -> str:
        for capability in [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]:
            with monkeypatch.context() as patch:
                patch.setattr(
                    torch.cuda, "get_device_capability", lambda device, result=capability: result
                )
                if support.__wrapped__(torch.device("cuda", 0), fmt).kind == "native":
                    return (
                        "everywhere"
                        if capability == (7, 0) and fmt.bits >= 32
                        else f"from {capability[0]}.{capability[1]}"
                    )
        for arch in get_args(Arch):
            with assumed(arch):
                if support.__wrapped__(torch.device("cuda", 0), fmt).kind == "native":
                    number = arch.strip("sm_a")
                    return f"from {number[:-1]}.{number[-1]} to 9.0, by [qsync kernels](kernels.md)"
        return "none"

    def row(fmt: Precision) -> tuple[str, ...]:
        result = list(dict.fromkeys(on_cpu(fmt, units) for units in (True, False)))
        return f"`{fmt.name}`", "; or ".join(f"{s.kind}: {s.reason}" for s in result), on_cuda(fmt)

    head = ("format", "on the CPU", "native on CUDA (compute capability)")
    return pages.markdown(head, map(row, FORMATS.values()))


def test_every_option_has_a_section_with_an_example() -> None:
    sections = {name: text for page in OPTIONS for name, text in sections_of(page).items()}
    for name in DOCUMENTED:
        examples = [block.text for block in pages.blocks(sections[name]) if block.runs]
        assert any(f'"{name}"' in example for example in examples), (
            f"the option {name} has no example"
        )
