"""Build module list and import edges of qsync_fx in TREE."""

import ast
import collections
from pathlib import Path

TREE = Path(".")


def modules(tree=TREE):
    out = {}
    for top in ("qsync_fx", "passes", "backend"):
        for p in sorted((tree / top).rglob("*.py")):
            rel = p.relative_to(tree)
            if top == "qsync_fx" and rel.parts[1] in ("passes", "backend"):
                continue
            parts = list(rel.with_suffix("").parts)
            if top != "qsync_fx":
                parts = ["qsync_fx"] + parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            out[".".join(parts)] = p
    return out


_EXP = {}


def reexported(mods, pkg, name):
    """whether the __init__ of pkg binds name by importing a symbol"""
    if pkg not in mods or mods[pkg].name != "__init__.py":
        return False
    if pkg not in _EXP:
        try:
            src = mods[pkg].read_text()
        except FileNotFoundError:
            return False
        body = ast.parse(src).body
        body = body + [
            x for st in body if isinstance(st, ast.If) and "TYPE_CHECKING" in ast.unparse(st.test) for x in st.body
        ]
        _EXP[pkg] = {
            a.asname or a.name
            for st in body
            if isinstance(st, ast.ImportFrom)
            for a in st.names
            if f"{st.module}.{a.name}" not in mods
        } | {st.name for st in ast.parse(src).body if hasattr(st, "name")}
    return name in _EXP[pkg]


def imports(tree_ast, mods):
    """yield (target module, kind, name) kind: top, lazy, type"""

    def walk(node, kind):
        for child in ast.iter_child_nodes(node):
            k = kind
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                k = "type"
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                k = "lazy" if kind != "type" else kind
            if (
                isinstance(child, ast.ImportFrom)
                and child.module
                and child.level == 0
                and child.module.split(".")[0] == "qsync_fx"
            ):
                for a in child.names:
                    full = f"{child.module}.{a.name}"
                    if full in mods and not reexported(mods, child.module, a.name):
                        yield full, k, None, a.asname or a.name
                    else:
                        yield child.module, k, a.name, a.asname or a.name
            elif isinstance(child, ast.Import):
                for a in child.names:
                    if a.name.split(".")[0] == "qsync_fx":
                        yield a.name, k, None, a.asname
            yield from walk(child, k)

    yield from walk(tree_ast, "top")


if __name__ == "__main__":
    mods = modules()
    cnt = collections.Counter()
    for m, p in mods.items():
        for t, k, name, _ in imports(ast.parse(p.read_text()), mods):
            cnt[k, "module" if name is None else "name"] += 1
    print(len(mods), cnt)
