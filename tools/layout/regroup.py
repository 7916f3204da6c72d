"""usage: regroup.py TREE LAYOUT RENAMES   - moves, merges and renames modules and top-level symbols over the whole tree."""

import ast
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from scopes import Builder, resolve

TREE = Path(sys.argv[1])
import module_graph as G

MODS = G.modules(TREE)


def load_layout(path):
    m = collections.OrderedDict()
    for line in open(path):
        line = line.split("#")[0].strip()
        if not line:
            continue
        new, _, olds = line.partition(" :")
        m["qsync_fx." + new.strip()] = ["qsync_fx." + o for o in olds.split()]
    m["qsync_fx"] = ["qsync_fx"]
    return m


LAY = load_layout(sys.argv[2]) if sys.argv[2] != "-" else collections.OrderedDict((m, [m]) for m in MODS)
OLD2NEW = {o: n for n, os_ in LAY.items() for o in os_}
for m in MODS:
    if m not in OLD2NEW:
        print("UNMAPPED (kept)", m)
        OLD2NEW[m] = m
        LAY[m] = [m]
REN = {}
LOCAL = {}
APPEND = collections.defaultdict(list)
for line in open(sys.argv[3]):
    line = line.split("#")[0].strip()
    if not line:
        continue
    if line.startswith("append "):
        _, mod, text = line.split(" ", 2)
        APPEND["qsync_fx." + mod].append(text)
        continue
    if line.startswith("local "):  # local old.module:name newlocal
        _, a, b = line.split()
        mod, n = a.split(":")
        LOCAL["qsync_fx." + mod, n] = b
        continue
    a, b = line.split()
    mod, n = a.split(":")
    REN["qsync_fx." + mod, n] = b
SRC = {m: p.read_text() for m, p in MODS.items()}
AST = {m: ast.parse(s) for m, s in SRC.items()}
for mod, n in REN:
    if mod not in MODS:
        print("RENAME of unknown module", mod)
        continue
    defs = {
        x
        for st in AST[mod].body
        for x in (
            [st.name]
            if isinstance(st, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
            else [t.id for t in ast.walk(st) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)]
            if isinstance(st, (ast.Assign, ast.AnnAssign, ast.Try, ast.If))
            else []
        )
    }
    if n not in defs:
        print("RENAME of unknown symbol", mod, n)


def first_docstring(tree):
    return ast.get_docstring(tree, clean=False)


for m in MODS:
    G.reexported(MODS, m, "")
PKG = {m for m in MODS if MODS[m].name == "__init__.py"}
EXP = {}
for m in MODS:
    for t, k, name, loc in G.imports(AST[m], MODS):
        if (k == "top" or (k == "type" and m in PKG)) and name:
            EXP[m, loc] = (t, name)
        elif k == "top" and name is None and loc:
            EXP[m, loc] = (t, None)
DEFS = {}


def defs_of(m):
    if m not in DEFS:
        b = Builder(AST[m])
        DEFS[m] = b.root.bound - set(b.root.imports)
    return DEFS[m]


def origin(t, name):
    """the module that defines name of t (t may only re-export it)"""
    seen = set()
    while t in MODS and name not in defs_of(t) and (t, name) in EXP and (t, name) not in seen:
        seen.add((t, name))
        t2, n2 = EXP[t, name]
        if n2 is None:
            return t2, None
        t, name = t2, n2
    return t, name


NEWPKGS = {n for n in LAY if any(x.startswith(n + ".") for x in LAY)}


def target(t, name, own=None, direct=False):
    """-> (new module, new symbol) for the symbol `name` of old module t"""
    # packages that stay packages keep their re-exports
    o, n = origin(t, name)
    if own is not None and n is not None and OLD2NEW.get(o) == own:
        return own, REN.get((o, n), n)
    if direct:
        return (OLD2NEW[o], None) if n is None else (OLD2NEW.get(o, o), REN.get((o, n), n))
    if t in PKG and OLD2NEW.get(t) in NEWPKGS and (o, n) != (t, name) and t != o:
        # re-exported by a package that stays: import from it still
        if n is None:
            return OLD2NEW[t], name
        return OLD2NEW[t], REN.get((o, n), n)
    if n is None:
        return OLD2NEW[o], None
    return OLD2NEW.get(o, o), REN.get((o, n), n)


# ---- dotted and path patterns
dotted = sorted((m for m in OLD2NEW if m != "qsync_fx" and OLD2NEW[m] != m), key=len, reverse=True)


def newpath(n):
    parts = n.split(".")
    if len(parts) > 1 and parts[1] in ("passes", "backend"):
        parts = parts[1:]
    return "/".join(parts) + ("/__init__.py" if n in NEWPKGS or n == "qsync_fx" else ".py")


alltops = "|".join(re.escape(m) for m in dotted)
symtab = collections.defaultdict(dict)
for (m, n), b in REN.items():
    symtab[m][n] = b
allmods = sorted((m for m in OLD2NEW if m != "qsync_fx"), key=len, reverse=True)
DOT = re.compile(r"(?<![\w./])(" + "|".join(re.escape(m) for m in allmods) + r")(?![\w-])((?:[.:])\w+)?")


def dot_sub(mt):
    m, sym = mt.group(1), mt.group(2) or ""
    if m in PKG and sym.startswith(".") and f"{m}{sym}" not in OLD2NEW and (m, sym[1:]) in EXP:
        nm, ns = target(m, sym[1:])
        return f"{nm}{sym[0]}{ns}"
    if sym and sym[1:] in symtab[m]:
        sym = sym[0] + symtab[m][sym[1:]]
    return OLD2NEW[m] + sym


paths = {}
for m, p in MODS.items():
    rel = str(p.relative_to(TREE))
    paths[rel] = newpath(OLD2NEW[m])
    if m not in PKG or True:
        if rel.startswith(("passes/", "backend/")):
            paths["qsync_fx/" + rel] = "qsync_fx/" + newpath(OLD2NEW[m])
PATH = re.compile(
    r"(?<![\w/.-])((?:\.\./)*)(" + "|".join(re.escape(r) for r in sorted(paths, key=len, reverse=True)) + r")(?![\w])"
)
FROM = re.compile(r"from (qsync_fx[\w.]*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)")


def snippet_sub(s):
    """code in a string or a page: import lines, the aliases of modules and renamed symbols that they bring"""
    alias = {}

    def one(m):
        mod = m.group(1)
        groups = collections.OrderedDict()
        if mod not in MODS:
            return m.group(0)
        for item in m.group(2).split(", "):
            n, _, a = item.partition(" as ")
            full = f"{mod}.{n}"
            if full in MODS and not G.reexported(MODS, mod, n):
                N = OLD2NEW[full]
                last = N.rsplit(".", 1)[1]
                if not a:
                    alias[n] = (last, full)
                else:
                    alias[a] = (a, full)
                groups.setdefault(N.rsplit(".", 1)[0], []).append(last + (f" as {a}" if a else ""))
            else:
                N, S = target(mod, n)
                if S is None:
                    N, S = N.rsplit(".", 1)
                if n != S and not a:
                    alias[n] = (S, None)
                groups.setdefault(N, []).append(S + (f" as {a}" if a else ""))
        return (
            "; ".join(f"from {N} import " + ", ".join(v) for N, v in groups.items())
            if ";" in s.split(m.group(0))[0].split("\n")[-1] + s.split(m.group(0))[1].split("\n")[0]
            else (
                "\n" + re.search(r"[^\n]*$", s[: m.start()]).group(0)
                if not re.search(r"[^\n]*$", s[: m.start()]).group(0).strip()
                or re.search(r"[^\n]*$", s[: m.start()]).group(0).strip() in (">>>",)
                else "; "
            ).join(f"from {N} import " + ", ".join(v) for N, v in groups.items())
        )

    r = FROM.sub(one, s)
    for old, (new, full) in alias.items():
        if full:

            def att(m):
                S = target(full, m.group(1))[1] or m.group(1)
                return f"{new}.{S}"

            r = re.sub(rf"(?<![\w.]){old}\.(\w+)", att, r)
        else:
            r = re.sub(rf"(?<![\w.\"'-]){old}(?=[(\[.,)\s])", new, r)
    return r


def mask(s):
    """import lines that snippet_sub wrote, so that they are not mapped twice"""
    return s


def text_sub(s):
    if "from qsync_fx" in s:
        out = []
        last = 0
        # each string or block of code by itself
        parts = re.split(r"(^```.*?^```|\"\"\".*?\"\"\")", s, flags=re.S | re.M)
        new = "".join(snippet_sub(x) for x in parts)
        if new != s:
            keep = {}

            def hide(m):
                k = f"\0{len(keep)}\0"
                keep[k] = m.group(0)
                return k

            t = FROM.sub(hide, new)
            t = DOT.sub(dot_sub, t)
            t = PATH.sub(lambda m: m.group(1) + paths[m.group(2)], t)
            return re.sub(r"\0\d+\0", lambda m: keep[m.group(0)], t)
    s = DOT.sub(dot_sub, s)
    return PATH.sub(lambda m: m.group(1) + paths[m.group(2)], s)


REPORT = []


class Edits:
    def __init__(self, src):
        self.src = src
        self.b = src.encode()
        self.lines = [0]
        for i, c in enumerate(self.b):
            if c == 10:
                self.lines.append(i + 1)
        self.e = []

    def pos(self, line, col):
        return self.lines[line - 1] + col

    def span(self, n):
        return self.pos(n.lineno, n.col_offset), self.pos(n.end_lineno, n.end_col_offset)

    def add(self, a, b, text):
        self.e.append((a, b, text))

    def apply(self, outside=None):
        out = []
        last = 0
        for a, b, t in sorted(set(self.e)):
            if a < last:
                REPORT.append(f"overlapping edit {self.b[a:b]!r} -> {t!r}")
                continue
            seg = self.b[last:a].decode()
            out.append(outside(seg) if outside else seg)
            out.append(t)
            last = b
        seg = self.b[last:].decode()
        out.append(outside(seg) if outside else seg)
        return "".join(out)


def name_span(ed, node, name, role):
    """byte span of an identifier of a def/arg/import-less use"""
    if role in ("load", "store"):
        return ed.span(node)
    if role == "arg":
        a = ed.pos(node.lineno, node.col_offset)
        return a, a + len(name.encode())
    if role == "def":
        a = ed.pos(node.lineno, node.col_offset)
        if node.decorator_list:
            pass
        seg = ed.b[a:]
        mt = re.match(rb"(?:async\s+)?(?:def|class)\s+", seg)
        return a + mt.end(), a + mt.end() + len(name.encode())
    if role == "except":
        a = ed.pos(node.lineno, node.col_offset)
        mt = re.compile(rb"\bas\s+" + name.encode() + rb"\b").search(ed.b, a)
        return mt.end() - len(name.encode()), mt.end()
    return None


def render(mod, names):  # names: list of (name, asname)
    return f"from {mod} import " + ", ".join(n if a is None or a == n else f"{n} as {a.strip('=')}" for n, a in names)


def between(scope, owner):
    s = scope
    while s is not None and s is not owner:
        yield s
        s = s.parent


def process(src, tree, own_old, own_new, hoist, relabel={}):
    """returns (body text, hoisted imports list, type-checking imports list, __all__ names, docstring)
    own_old: old module name or None (tests, benchmarks)"""
    ed = Edits(src)
    b = Builder(tree)
    uses_by = collections.defaultdict(list)
    for scope, node, name, role in b.uses:
        o = resolve(scope, name)
        if o is not None:
            uses_by[id(o), name].append((scope, node, role))
    attr_of = {}
    parents = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
            attr_of[id(n.value)] = n
        for c in ast.iter_child_nodes(n):
            parents[id(c)] = n
    # map import statements to scopes
    scope_of_stmt = {}
    for scope, node, name, role in b.uses:
        if role == "import":
            scope_of_stmt[id(node)] = scope

    def rename_uses(owner, old, new, self_ref=False):
        """False when the new name is shadowed somewhere"""
        if old == new and not self_ref:
            return True
        todo = []
        for scope, node, role in uses_by[id(owner), old]:
            if role == "import":
                continue
            for s in between(scope, None):
                if s.kind == "class" and s is not scope:
                    continue
                if s.kind == "module":
                    break
                if new in s.bound and not (s is owner and new == old):
                    return False
            todo.append((node, role))
        if owner.kind == "module" and not self_ref and new in owner.bound and new != old:
            return False
        if old != new:
            for node, role in todo:
                sp = name_span(ed, node, old, role)
                if sp is None:
                    REPORT.append(f"{own_old}: cannot rename {role} {old}")
                    continue
                ed.add(*sp, new)
        return True

    # 1 own top-level definitions that are renamed
    if own_old:
        for (m, n), new in REN.items():
            if m == own_old:
                if not rename_uses(b.root, n, new):
                    REPORT.append(f"{own_old}: {n} -> {new} is shadowed")
    out_imports = []
    type_imports = []
    removed = []

    def handle(stmt, kind, toplevel):
        scope = scope_of_stmt[id(stmt)]
        pieces = []  # rendered lines
        if isinstance(stmt, ast.Import):
            names = []
            for a in stmt.names:
                names.append(DOT.sub(dot_sub, a.name) + (f" as {a.asname}" if a.asname else ""))
            pieces = [("import " + ", ".join(names))]
            ids = [
                ((a.asname or a.name.split(".")[0]), ("ext", a.name if a.asname else a.name.split(".")[0], None))
                for a in stmt.names
            ]
            return pieces, ids
        if stmt.level or not stmt.module or stmt.module.split(".")[0] != "qsync_fx":
            names = [(a.name, a.asname) for a in stmt.names]
            final = []
            for n, a in names:
                l = a or n
                nl = LOCAL.get((own_old, l), relabel.get(l, l))
                if nl != l:
                    if not rename_uses(scope, l, nl):
                        REPORT.append(f"{own_old}: import {l} as {nl} shadowed")
                final.append((n, nl))
            return (
                [render("." * stmt.level + (stmt.module or ""), final)],
                [(a or n, ("ext", stmt.module, n)) for n, a in final],
            )
        groups = collections.OrderedDict()
        ids = []
        for a in stmt.names:
            full = f"{stmt.module}.{a.name}"
            L = a.asname or a.name
            if full in MODS and not G.reexported(MODS, stmt.module, a.name):
                N = OLD2NEW[full]
                module_import = True
            elif stmt.module in MODS:
                N, S = target(stmt.module, a.name, own_new, hoist and stmt.module != "qsync_fx")
                module_import = S is None
            else:
                # e.g. _C
                groups.setdefault(stmt.module, []).append((a.name, a.asname))
                ids.append((L, ("ext", stmt.module, a.name)))
                continue
            if module_import:
                last = N.rsplit(".", 1)[1]
                T = full if full in MODS else None
                if own_new == N and hoist:
                    for sc, node, role in uses_by[id(scope), L]:
                        if role == "import":
                            continue
                        at = attr_of.get(id(node))
                        if at is None:
                            REPORT.append(f"{own_old}: module {L} of its own is used as a value, line {node.lineno}")
                            continue
                        nm, ns = target(T, at.attr)
                        bad = [
                            s
                            for s in between(sc, None)
                            if s.kind != "module" and ns in s.bound and not (s.kind == "class" and s is not sc)
                        ]
                        if bad:
                            REPORT.append(f"{own_old}:{node.lineno}: {L}.{at.attr} -> {ns} is shadowed")
                            continue
                        if nm != N:
                            REPORT.append(f"{own_old}:{node.lineno}: {L}.{at.attr} comes from {nm}")
                        ed.add(*ed.span(at), ns)
                    continue
                want = (
                    LOCAL.get((own_old, L))
                    or relabel.get(L)
                    or (last if a.asname in (None, a.name) or a.asname == last else a.asname)
                )
                if not rename_uses(scope, L, want):
                    want = L
                    REPORT.append(f"note {own_old or own_file}: keeps the alias {L} for {N}")
                for sc, node, role in uses_by[id(scope), L]:
                    at = attr_of.get(id(node)) if role != "import" else None
                    if at is None:
                        continue
                    nm, ns = target(T, at.attr) if T else (N, at.attr)
                    if ns != at.attr and ns is not None:
                        e = ed.span(at)[1]
                        ed.add(e - len(at.attr.encode()), e, ns)
                groups.setdefault(N.rsplit(".", 1)[0], []).append((last, "=" + want if a.asname == a.name else want))
                ids.append((want, ("module", N, None)))
            else:
                if own_new == N and hoist:
                    if not rename_uses(scope, L, S, self_ref=True):
                        REPORT.append(f"{own_old}: {L} of its own ({S}) is shadowed")
                    continue
                want = LOCAL.get((own_old, L)) or relabel.get(L) or (a.asname if a.asname and a.asname != a.name else S)
                if not rename_uses(scope, L, want):
                    want = L
                    REPORT.append(f"note {own_old or own_file}: keeps the name {L} for {S} of {N}")
                renamed_locals[L] = want
                groups.setdefault(N, []).append((S, "=" + want if a.asname == a.name else want))
                ids.append((want, ("sym", N, S)))
        return [render(m, n) for m, n in groups.items()], ids

    own_file = process.file
    renamed_locals = {}
    doc = None
    alls = []
    body = tree.body

    def cut(stmt, text=None):
        a = ed.pos(stmt.lineno, 0)
        e = ed.pos(stmt.end_lineno, stmt.end_col_offset)
        # through the end of the line
        nl = ed.b.find(b"\n", e)
        nl = len(ed.b) if nl < 0 else nl + 1
        ed.add(a, nl, text or "")

    def comment_of(stmt):
        e = ed.pos(stmt.end_lineno, stmt.end_col_offset)
        nl = ed.b.find(b"\n", e)
        rest = ed.b[e:nl].decode().strip() if nl >= 0 else ""
        if rest.startswith("#"):
            return "  " + rest
        inner = ed.b[ed.pos(stmt.lineno, stmt.col_offset) : e].decode()
        c = re.findall(r"#.*", inner)
        return "  " + c[0] if c else ""

    handled = set()
    if hoist:
        if (
            body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            doc = body[0].value.value
            cut(body[0])
            body = body[1:]
    for stmt in body:
        if isinstance(stmt, (ast.Import, ast.ImportFrom)):
            handled.add(id(stmt))
            pieces, ids = handle(stmt, "top", True)
            c = comment_of(stmt)
            if hoist:
                cut(stmt)
                out_imports.append((pieces, ids, c))
            else:
                cut(stmt, "".join(p + (c if i == 0 else "") + "\n" for i, p in enumerate(pieces)))
        elif isinstance(stmt, ast.If) and "TYPE_CHECKING" in ast.unparse(stmt.test) and hoist:
            for st in stmt.body:
                if isinstance(st, (ast.Import, ast.ImportFrom)):
                    handled.add(id(st))
                    pieces, ids = handle(st, "type", True)
                    type_imports.append((pieces, ids, comment_of(st)))
                else:
                    REPORT.append(f"{own_old}: statement in TYPE_CHECKING: {ast.unparse(st)[:80]}")
            cut(stmt)
        elif (
            not hoist
            and isinstance(stmt, ast.Assign)
            and isinstance(stmt.targets[0], ast.Name)
            and stmt.targets[0].id == "__all__"
        ):
            for c in ast.walk(stmt.value):
                if isinstance(c, ast.Constant) and isinstance(c.value, str):
                    w = renamed_locals.get(c.value) or REN.get((own_old, c.value))
                    if w and w != c.value:
                        ed.add(*ed.span(c), repr(w).replace("'", '"'))
        elif (
            hoist
            and isinstance(stmt, ast.Assign)
            and isinstance(stmt.targets[0], ast.Name)
            and (own_old, stmt.targets[0].id) in DROP
        ):
            cut(stmt)
        elif (
            hoist
            and isinstance(stmt, ast.Assign)
            and isinstance(stmt.targets[0], ast.Name)
            and stmt.targets[0].id == "__all__"
        ):
            try:
                alls += ast.literal_eval(stmt.value)
            except ValueError:
                REPORT.append(f"{own_old}: __all__ is computed")
                continue
            cut(stmt)
    for n in ast.walk(tree):
        if isinstance(n, (ast.Import, ast.ImportFrom)) and id(n) not in handled:
            if id(n) not in scope_of_stmt:
                continue
            pieces, ids = handle(n, "lazy", False)
            src_seg = ed.b[ed.pos(n.lineno, n.col_offset) : ed.pos(n.end_lineno, n.end_col_offset)].decode()
            if isinstance(n, ast.ImportFrom) and (not n.module or n.module.split(".")[0] != "qsync_fx"):
                continue
            indent = " " * n.col_offset
            siblings = None
            p = parents[id(n)]
            for f in ("body", "orelse", "finalbody"):
                if n in getattr(p, f, []):
                    siblings = getattr(p, f)
            if not pieces and siblings and all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in siblings) and False:
                pass
            text = ("\n" + indent).join(pieces) or "pass"
            ed.add(*ed.span(n), text)
    # __all__ strings in a file that stays
    text = ed.apply(text_sub)
    return text, out_imports, type_imports, alls, doc


process.file = None


def toposort(olds):
    order = list(olds)
    deps = {o: set() for o in olds}
    for o in olds:
        for t, k, name, _ in G.imports(AST[o], MODS):
            if k != "top":
                continue
            if name:
                t = origin(t, name)[0]
            if t in deps and t != o:
                deps[o].add(t)
    out = []
    while order:
        for o in order:
            if not deps[o] - set(out):
                out.append(o)
                order.remove(o)
                break
        else:
            REPORT.append(f"cycle among {order}")
            out += order
            break
    return out


DROP = set()


def same_statement(o1, d1, o2, d2):
    def st(o, d):
        for x in AST[o].body:
            if (
                isinstance(x, ast.Assign)
                and len(x.targets) == 1
                and isinstance(x.targets[0], ast.Name)
                and x.targets[0].id == d
            ):
                return ast.unparse(x.value)

    a, b = st(o1, d1), st(o2, d2)
    return a is not None and a == b


outputs = {}
for new, olds in LAY.items():
    if not olds:
        outputs[new] = '"""Tensors of a running model, as measured indicators read them."""\n'
        continue
    if len(olds) == 1 and not APPEND[new]:
        o = olds[0]
        process.file = str(MODS[o])
        if True:
            text, *_ = process(SRC[o], AST[o], o, new, False)
            outputs[new] = text
            continue
    olds = toposort(olds)
    # conflicts of names
    table = {}
    relabel = collections.defaultdict(dict)
    for o in olds:
        for d in defs_of(o):
            if d.startswith("__"):
                continue
            n = REN.get((o, d), d)
            if n in table and table[n] != ("def", o, d) and same_statement(o, d, table[n][1], table[n][2]):
                DROP.add((o, d))
                continue
            if n in table and table[n] != ("def", o, d):
                fresh = f"{'_' if n.startswith('_') else ''}{o.rsplit('.', 1)[1]}_{n.lstrip('_')}"
                REPORT.append(f"CONFLICT def {n} of {o} and {table[n][1]} in {new}: {o}:{d} -> {fresh}")
                REN[o, d] = fresh
                n = fresh
            table[n] = ("def", o, d)
    for o in olds:
        for t, k, name, loc in G.imports(AST[o], MODS):
            if k == "lazy" or not loc:
                continue
            if name is None:
                N = OLD2NEW[t]
                if new == N:
                    continue
                l = LOCAL.get((o, loc)) or (N.rsplit(".", 1)[1] if loc == t.rsplit(".", 1)[1] else loc)
                ident = ("module", N, None)
            else:
                if t not in MODS:
                    l, ident = loc, ("ext", t, name)
                else:
                    N, S = target(t, name, new, t != "qsync_fx")
                    if new == N:
                        continue
                    l = LOCAL.get((o, loc)) or (S if loc == name and S else loc)
                    ident = ("sym", N, S) if S else ("module", N, None)
            if l in table and table[l] != ident:
                fresh = f"{ident[1].rsplit('.', 1)[1]}_{l}"
                REPORT.append(f"CONFLICT import {l} {ident} in {o} with {table[l]} in {new} -> local {o}:{loc} {fresh}")
                relabel[o][loc] = fresh
                l = fresh
            table[l] = ident
        # third-party imports
        for st in AST[o].body:
            if isinstance(st, ast.ImportFrom) and (st.module or "").split(".")[0] != "qsync_fx":
                for a in st.names:
                    loc = a.asname or a.name
                    l = LOCAL.get((o, loc), loc)
                    ident = ("ext", st.module, a.name)
                    if l in table and table[l] != ident:
                        fresh = f"{st.module.rsplit('.', 1)[-1]}_{l}"
                        REPORT.append(
                            f"CONFLICT import {l} {ident} in {o} with {table[l]} in {new} -> local {o}:{loc} {fresh}"
                        )
                        relabel[o][loc] = fresh
                        l = fresh
                    table[l] = ident
            elif isinstance(st, ast.Import):
                for a in st.names:
                    loc = a.asname or a.name.split(".")[0]
                    ident = ("ext", a.name if a.asname else a.name.split(".")[0], None)
                    if loc in table and table[loc] != ident:
                        REPORT.append(f"CONFLICT import {loc} of {o} in {new} with {table[loc]}")
                    table[loc] = ident
    LAY[new] = olds
    outputs[new] = (olds, relabel)
main_of = {}
for new, v in outputs.items():
    if isinstance(v, str):
        continue
    olds, relabel = v
    bodies = []
    imps = []
    types = []
    alls = []
    docs = []
    for o in olds:
        process.file = str(MODS[o])
        text, i, t, al, doc = process(SRC[o], AST[o], o, new, True, relabel[o])
        bodies.append((o, text.strip("\n")))
        imps += i
        types += t
        alls += [(target(o, a)[1] or a) if (o, a) in EXP else REN.get((o, a), a) for a in al]
        if doc:
            docs.append((len(SRC[o]), doc, o))
    lines = []
    seen = set()
    runtime = set()
    for pieces, ids, c in imps:
        runtime |= {x for x, _ in ids}
        for i, p in enumerate(pieces):
            s = p + (c if i == 0 else "")
            if s not in seen:
                seen.add(s)
                lines.append(s)
    fut = [l for l in lines if l.startswith("from __future__")]
    lines = [l for l in lines if not l.startswith("from __future__")]
    tl = []
    names = set()
    for pieces, ids, c in types:
        keep = [x for x, _ in ids if x not in runtime]
        if not keep and ids:
            continue
        for p in pieces:
            if p not in seen:
                seen.add(p)
                tl.append("    " + p)
    docs_sorted = [d for d in docs if True]
    if docs_sorted:
        maind = max(docs_sorted, key=lambda d: (OLD2NEW[d[2]] == d[2], d[0])) if new not in NEWPKGS else docs_sorted[0]
        rest = [d for d in docs if d is not maind]
        parts = [maind[1].strip("\n")] + [d[1].strip() for d in rest]
        text = "\n\n".join(x.strip() for x in parts if x.strip())
        text = text_sub(text)
        q = '"""'
        esc = text.replace("\\", "\\\\") if "\\" in text else text
        docl = f"{q}{esc}\n{q}\n" if "\n" in text else f"{q}{esc}{q}\n"
    else:
        docl = ""
    chunk = [docl.rstrip("\n"), ""]
    if fut:
        chunk += ["from __future__ import annotations", ""]
    chunk += lines + [""]
    if tl:
        chunk += ["if TYPE_CHECKING:"] + tl + [""]
    if alls:
        chunk += ["__all__ = " + repr(sorted(set(alls))), ""]
    for o, t in bodies:
        if t.strip():
            chunk += ["", t, ""]
    chunk += ["", *APPEND[new], ""]
    outputs[new] = "\n".join(chunk)
# ---- write
for m, p in MODS.items():
    p.unlink()
for new, text in outputs.items():
    path = TREE / newpath(new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
for new in NEWPKGS:
    p = TREE / newpath(new)
    if not p.exists():
        raise SystemExit(f"{new} needs a module for its __init__ in layout.txt")
# ---- other Python files
others = [p for top in ("tests", "benchmarks", "examples") for p in (TREE / top).rglob("*.py")]
for p in others:
    s = p.read_text()
    try:
        t = ast.parse(s)
    except SyntaxError:
        continue
    process.file = str(p)
    text, *_ = process(s, t, None, None, False)
    if text != s:
        p.write_text(text)
for p in [
    *TREE.rglob("*.md"),
    TREE / "Makefile",
    TREE / "pyproject.toml",
    TREE / "CMakeLists.txt",
    *(TREE / "cpp").rglob("*.*"),
    *(TREE / "qsync_fx").glob("*.pyi"),
    *(TREE / "examples").rglob("*.ipynb"),
    *(TREE / "tests").rglob("*.txt"),
]:
    if ".venv" in p.parts or not p.is_file():
        continue
    try:
        s = p.read_text()
    except UnicodeDecodeError:
        continue
    t = text_sub(s)
    if t != s:
        p.write_text(t)
for top in ("qsync_fx", "passes", "backend"):
    for d, _, f in os.walk(TREE / top, topdown=False):
        if not os.path.islink(d) and not os.listdir(d):
            os.rmdir(d)
        elif set(os.listdir(d)) <= {"__pycache__"}:
            subprocess.run(["rm", "-rf", d])
for r in REPORT:
    print(r)
