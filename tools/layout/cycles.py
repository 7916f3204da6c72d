import ast
import collections
import sys

from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import module_graph as G
import networkx as nx

T = Path(sys.argv[1])
mods = G.modules(T)
A = nx.DiGraph()
why = collections.defaultdict(list)
for m, p in mods.items():
    t = ast.parse(p.read_text())
    for x, k, name, loc in G.imports(t, mods):
        if x in mods and x != m:
            A.add_edge(m, x)
            why[m, x].append((k, name))
    for n in ast.walk(t):
        if (
            isinstance(n, ast.Call)
            and "import_module" in ast.unparse(n.func)
            and n.args
            and isinstance(n.args[0], ast.Constant)
            and n.args[0].value in mods
        ):
            A.add_edge(m, n.args[0].value)
            why[m, n.args[0].value].append(("importlib", None))
A.remove_nodes_from(["qsync_fx"])
for c in sorted(nx.strongly_connected_components(A), key=len, reverse=True):
    if len(c) > 1:
        print(len(c), sorted(x.removeprefix("qsync_fx.") for x in c)[:400] if len(c) < 60 else "")
        sub = A.subgraph(c)
        weak = [(a, b) for a, b in sub.edges if all(k != "top" for k, _ in why[a, b])]
        for a, b in sorted(weak):
            print("    ", a.removeprefix("qsync_fx."), "->", b.removeprefix("qsync_fx."), why[a, b])
