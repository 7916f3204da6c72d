"""Names that a module imports on first use (PEP 562), declared by the imports in its stub.

Type checkers read the same stub (.pyi), so that each name is written once.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def declared(file: str) -> dict[str, tuple[str, str]]:
    """Return the module and the attribute of each name that the stub of a file imports."""
    tree = ast.parse(pathlib.Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }


def importer(module: str, names: dict[str, tuple[str, str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, which imports the names and stores them."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, attribute = names[name]
        if home == module:
            return importlib.import_module(f"{home}.{attribute}")
        # No submodule may have the name of an object: its import would replace the object.
        value = pkgutil.resolve_name(f"{home}:{attribute}")
        setattr(sys.modules[module], name, value)
        return value

    return __getattr__
