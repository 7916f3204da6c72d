"""Naming rules of the project, for variables, functions, classes, files and folders.

A name is a noun or a verb for the value, the class or the file. The lists below exclude words
without information, such as `found`, `kept` or `at`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.source_files import BENCHMARKS, PRODUCT, ROOT, TESTS, python_files

SOURCES = python_files(PRODUCT)
NAMED = {
    "product": SOURCES,
    "benchmarks": python_files(BENCHMARKS),
    "tests": python_files(TESTS),
}

NO_VARIABLES = frozenset(
    "found at one own how what which given known taken told kept held seen asked said whole alike "
    "beside turned lying "
    "there here way ways".split()
)
"""Words that do not name a variable: write `result`, `index`, `item`, `saved`, `requested`."""

DEFINITIONS = frozenset({"at", "what"})
"""Exceptions: `graph.at(batch=8)` is clear, and `what` of an error is public."""

NO_CLASSES_OR_FILES = frozenset(
    "kept held told given asked known found seen taken said planned made played judged learned "
    "remembered foreseen "
    "reckoned carried looking asking keeping telling saving ending taking settling waiting "
    "feeding returning norming "
    "passing following giving finding sending beside during again forced certain alone together "
    "unfit unasked "
    "undisturbed untouched moves idle chance lean".split()
)
"""Participles and gerunds that are no terms of the field, in names of classes and files."""

CLASSES = frozenset({"PlannedCast"})
"""Exceptions: classes with a participle before a noun that names the thing."""

MOST_FIELDS = {"product": 6, "benchmarks": 0, "tests": 0}
"""Fields of classes and module variables that still have such a name. Lower it; never raise it.

Those of the product are keys of profile files.
"""

MOST_FILES, MOST_FOLDERS, DEEPEST = 320, 45, 3
"""The limits leave room for plug-ins: each codec, objective or verb is a file (docs/howto-*.md)."""


def _bindings(tree: ast.AST, inside: str = "module") -> Iterator[tuple[ast.AST, str, str]]:
    """Yield node and name of each binding, with the scope: module, class or function.

    Functions, and attributes that are assigned such as `self.x`, have the scope "definition".
    """
    for node in ast.iter_child_nodes(tree):
        scope = inside
        if isinstance(node, ast.ClassDef):
            scope = "class"
        elif isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.comprehension)
        ):
            scope = "function"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.name, "definition"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, node.attr, "definition"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id, inside
        elif isinstance(node, ast.arg):
            yield node, node.arg, "function"
        yield from _bindings(node, scope)


def uninformative(source: str, scopes: frozenset[str]) -> list[tuple[int, str]]:
    """Return the line and the name of each binding in these scopes that breaks the rules."""
    return [
        (node.lineno, name)  # type: ignore[attr-defined]
        for node, name, scope in _bindings(ast.parse(source))
        if scope in scopes
        and name.lstrip("_") in NO_VARIABLES
        and not (scope == "definition" and name.lstrip("_") in DEFINITIONS)
    ]


def _places(folders: str, scopes: frozenset[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in NAMED[folders]
        for line, name in uninformative(path.read_text(), scopes)
    ]


@pytest.mark.parametrize("folders", NAMED)
def test_local_variables_and_parameters_say_what_they_are(folders: str) -> None:
    assert _places(folders, frozenset({"function"})) == []


@pytest.mark.parametrize("folders", ["product", "benchmarks"])
def test_functions_and_attributes_say_what_they_are(folders: str) -> None:
    assert _places(folders, frozenset({"definition"})) == []


@pytest.mark.parametrize("folders", NAMED)
def test_fields_with_uninformative_names_do_not_increase(folders: str) -> None:
    places = _places(folders, frozenset({"class", "module"}))
    assert len(places) <= MOST_FIELDS[folders], places


def test_planted_names_are_reported() -> None:
    source = (
        "class Kept:\n    at: int\n\n    def f(self, how):\n        found = [one for one in how]\n"
    )
    assert uninformative(source, frozenset({"function"})) == [(4, "how"), (5, "found"), (5, "one")]
    assert uninformative(source, frozenset({"class"})) == [(2, "at")]
    source = "class Kept:\n    def held(self):\n        self.own = ctx.how = 1\n"
    names = [name for _, name in uninformative(source, frozenset({"definition"}))]
    assert names == ["held", "own", "how"]
    assert _words("KeptPlan") & NO_CLASSES_OR_FILES == {"kept"}


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_classes_are_nouns() -> None:
    names = {
        f"{path.relative_to(ROOT)}: {node.name}": node.name
        for path in (*NAMED["product"], *NAMED["benchmarks"])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert set(names.values()) >= CLASSES
    assert [
        place
        for place, name in names.items()
        if _words(name) & NO_CLASSES_OR_FILES and name not in CLASSES
    ] == []


def test_files_are_nouns_and_few_share_a_name() -> None:
    assert [
        str(path.relative_to(ROOT))
        for path in (*NAMED["product"], *NAMED["benchmarks"])
        if _words(path.stem) & NO_CLASSES_OR_FILES
    ] == []
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    repeated = {stem for stem, count in Counter(path.stem for path in modules).items() if count > 1}
    assert len(repeated) <= 8, repeated


def test_folders_are_few_and_flat() -> None:
    folders = {path.parent for path in SOURCES}
    assert len(SOURCES) <= MOST_FILES
    assert len(folders) <= MOST_FOLDERS
    for folder in folders:
        parts = folder.relative_to(ROOT).parts
        assert len(parts) - 1 <= DEEPEST, folder
        members = {path for path in SOURCES if path.parent == folder and path.name != "__init__.py"}
        members |= {other for other in folders if other.parent == folder}
        # Plug-ins are modules that their package lists: a new one is a new file there.
        init = folder / "__init__.py"
        plugins = init.exists() and "listed_in_modules(__name__" in init.read_text()
        assert len(members) >= 3 or plugins, (
            f"{folder} has {len(members)} modules and packages; at least three are required"
        )
