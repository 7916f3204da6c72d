"""usage: locals.py TREE [FIXES] - renames local variables and parameters that say nothing (STYLE.md) in product code, with their call sites."""

import ast
import collections
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from scopes import Builder, resolve

T = Path(sys.argv[1])
NAMES = set(
    "found at one own how what which given known taken told kept held seen asked said whole alike beside turned lying there here way ways".split()
)
LOCAL = {
    "found": ["result", "matches", "results", "entries", "value"],
    "at": ["index", "position", "offset"],
    "one": ["item", "element", "entry"],
    "given": ["inputs", "arguments", "value"],
    "known": ["available", "cached", "table"],
    "what": ["message", "subject", "text"],
    "own": ["owned", "local_values", "mine"],
    "how": ["settings", "mode", "options", "extra_arguments"],
    "kept": ["saved", "retained", "remaining"],
    "held": ["live", "live_bytes", "stored"],
    "seen": ["visited", "observed", "recorded"],
    "asked": ["requested", "request", "queried"],
    "taken": ["used", "selected", "consumed"],
    "whole": ["full", "complete", "total_size"],
    "here": ["current", "local", "present"],
    "there": ["existing", "target", "present"],
    "beside": ["neighbours", "others", "concurrent"],
    "turned": ["transposed", "flipped"],
    "which": ["selected", "chosen", "kind"],
    "said": ["text", "reported", "described"],
    "way": ["method", "route", "mode"],
    "ways": ["methods", "routes", "modes"],
    "told": ["reported", "logged", "notices"],
    "alike": ["equal", "same", "equivalent"],
    "lying": ["layout", "stored"],
}
ARG = dict(LOCAL)
ARG.update(
    {
        "found": ["result", "value"],
        "given": ["value", "argument", "inputs"],
        "what": ["description", "subject", "message"],
        "at": ["index", "position", "offset"],
        "own": ["owned", "mine"],
        "known": ["available", "table", "cached"],
        "seen": ["observed", "visited", "recorded"],
        "one": ["item", "element", "value"],
        "here": ["current", "local", "graph_here"],
    }
)
FIX = {}
if len(sys.argv) > 2:
    for line in open(sys.argv[2]):
        if line.strip() and not line.startswith("#"):
            a, b = line.split()
            FIX[a] = b  # path:function:name new

files = []
for top in ("qsync_fx", "passes", "backend"):
    for p in sorted((T / top).rglob("*.py")):
        if top == "qsync_fx" and p.relative_to(T).parts[1] in ("passes", "backend"):
            continue
        files.append(p)
argmap = collections.defaultdict(dict)  # function simple name -> {old:new}
report = []
plans = {}


class E:
    def __init__(self, src):
        self.b = src.encode()
        self.l = [0]
        for i, c in enumerate(self.b):
            if c == 10:
                self.l.append(i + 1)
        self.e = set()

    def pos(self, ln, col):
        return self.l[ln - 1] + col

    def rep(self, a, old, new, where):
        if self.b[a : a + len(old)] != old.encode():
            report.append(f"{where}: expected {old} at {self.b[a : a + 20]!r}")
            return
        self.e.add((a, a + len(old), new))

    def out(self):
        r = bytearray()
        last = 0
        for a, b, t in sorted(self.e):
            r += self.b[last:a] + t.encode()
            last = b
        return bytes(r + self.b[last:]).decode()


def qual(scope):
    parts = []
    s = scope
    while s is not None and s.kind != "module":
        parts.append(getattr(s.node, "name", s.kind))
        s = s.parent
    return ".".join(reversed(parts))


def inside(s, owner):
    while s is not None:
        if s is owner:
            return True
        s = s.parent
    return False


for p in files:
    src = p.read_text()
    t = ast.parse(src)
    b = Builder(t)
    ed = E(src)
    rel = str(p.relative_to(T))
    owners = collections.OrderedDict()
    roles = collections.defaultdict(set)
    uses = collections.defaultdict(list)
    parents = {}
    for n in ast.walk(t):
        for c in ast.iter_child_nodes(n):
            parents[id(c)] = n
    for s, n, name, role in b.uses:
        o = resolve(s, name)
        if o is None:
            continue
        uses[id(o), name].append((s, n, role))
        if (
            name in NAMES
            and o.kind in ("function", "comp")
            and role in ("store", "arg", "except", "match", "load", "import")
        ):
            owners[id(o), name] = o
            roles[id(o), name].add(role)
    newbound = collections.defaultdict(set)
    for (oid, name), o in owners.items():
        if "import" in roles[oid, name]:
            continue
        isarg = "arg" in roles[oid, name]
        cands = (ARG if isarg else LOCAL)[name]
        if name == "at" and not isarg:
            pass
        if name == "found" and o.kind == "comp":
            cands = ["item", "result", "value", "match"]
        if name == "found" and not isarg:
            # a loop variable?
            for s, n, role in uses[oid, name]:
                if role == "store" and isinstance(parents.get(id(n)), (ast.For, ast.comprehension)):
                    cands = ["item", "entry", "match_"]
                    break
        if name == "given" and o.kind == "comp":
            cands = ["value", "argument", "entry"]
        if name == "known" and o.kind == "comp":
            cands = ["entry", "name_", "candidate"]
        if name == "what":
            st = [parents.get(id(n)) for s, n, r in uses[oid, name] if r == "store"]
            if st and not any(
                isinstance(x, ast.Assign)
                and (
                    isinstance(x.value, ast.JoinedStr)
                    or isinstance(x.value, ast.Constant)
                    or isinstance(x.value, ast.IfExp)
                    or isinstance(x.value, ast.BinOp)
                )
                for x in st
            ):
                cands = ["subject", "description", "message"]
        key = f"{rel}:{qual(o)}:{name}"
        if key in FIX:
            cands = [FIX[key]]

        def ok(new):
            if new in o.bound or new in newbound[oid]:
                return False
            for s, n, nm, role in b.uses:
                if nm == new and inside(s, o):
                    r = resolve(s, nm)
                    if r is None or not inside(r, o) or r is o:
                        return False  # captured global, builtin or own
            for s, n, role in uses[oid, name]:
                x = s
                while x is not o:
                    if new in x.bound or new in newbound[id(x)]:
                        return False
                    x = x.parent
            # enclosing comps/functions that bind the new name and are read inside are excluded by the check of uses above
            return True

        new = next((c for c in cands if ok(c)), None)
        if new is None:
            report.append(f"no name for {key} (tried {cands})")
            continue
        newbound[oid].add(new)
        for s, n, role in uses[oid, name]:
            if role in ("load", "store", "arg"):
                ed.rep(ed.pos(n.lineno, n.col_offset), name, new, rel)
            elif role == "except":
                a = ed.pos(n.lineno, n.col_offset)
                m = re.compile(rb"\bas\s+" + name.encode() + rb"\b").search(ed.b, a)
                ed.rep(m.end() - len(name), name, new, rel)
            elif role == "def":
                a = ed.pos(n.lineno, n.col_offset)
                m = re.match(rb"(?:async\s+)?(?:def|class)\s+", ed.b[a:])
                ed.rep(a + m.end(), name, new, rel)
            elif role == "match":
                report.append(f"match pattern {key}")
            else:
                report.append(f"{role} of {key}")
        if isarg and not isinstance(o.node, ast.Lambda):
            fn = o.node.name
            if fn in ("__init__", "__new__", "__call__") and o.parent.kind == "class":
                fn = o.parent.node.name if fn != "__call__" else fn
            if name in argmap[fn] and argmap[fn][name] != new:
                report.append(f"parameter {fn}({name}): {argmap[fn][name]} and {new}")
            argmap[fn][name] = new
    plans[p] = (src, t, ed)


def keywords(p, src, t, ed):
    for n in ast.walk(t):
        if isinstance(n, ast.Call):
            f = n.func
            fn = f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else None
            root = f
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("_C", "native"):
                continue
            if fn == "partial" and n.args:
                g = n.args[0]
                fn = g.id if isinstance(g, ast.Name) else g.attr if isinstance(g, ast.Attribute) else None
            if fn == "replace":
                continue
            for k in n.keywords:
                if k.arg in NAMES:
                    new = argmap.get(fn, {}).get(k.arg)
                    if new is None:
                        report.append(f"{p.relative_to(T)}:{n.lineno}: keyword {fn}({k.arg}=) stays")
                    else:
                        ed.rep(ed.pos(k.lineno, k.col_offset), k.arg, new, str(p))


for p, (src, t, ed) in plans.items():
    keywords(p, src, t, ed)
    r = ed.out()
    if r != src:
        p.write_text(r)
for top in ("tests", "benchmarks", "examples"):
    for p in (T / top).rglob("*.py"):
        src = p.read_text()
        t = ast.parse(src)
        ed = E(src)
        keywords(p, src, t, ed)
        r = ed.out()
        if r != src:
            p.write_text(r)
for r in report:
    print(r)
