import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
T = Path(sys.argv[1])
import module_graph as G

new = set(G.modules(T))
pat = re.compile(r"\bqsync_fx((?:\.[a-z_0-9]+)+)")
skip = {"qsync_fx.ops", "qsync_fx.lowerings", "qsync_fx.commands", "qsync_fx.passes"}
import collections

bad = collections.defaultdict(list)
for p in [
    *T.glob("*.md"),
    *T.glob("*.toml"),
    T / "Makefile",
    *(T / "docs").rglob("*.md"),
    *T.glob("tests/**/*.py"),
    *T.glob("benchmarks/**/*.py"),
    *T.glob("examples/**/*"),
    *T.glob("qsync_fx/**/*.py"),
    *T.glob("backend/**/*.py"),
    *T.glob("passes/**/*.py"),
    *T.glob("cpp/**/*.*"),
    T / "CMakeLists.txt",
]:
    if not p.is_file():
        continue
    try:
        s = p.read_text()
    except UnicodeDecodeError:
        continue
    for m in pat.finditer(s):
        parts = ("qsync_fx" + m.group(1)).split(".")
        # longest prefix that is a module
        k = len(parts)
        while k > 1 and ".".join(parts[:k]) not in new:
            k -= 1
        if k < len(parts) - 1 or (k == len(parts) - 1 and k == 1 and parts[1] not in ("_C",)):
            full = ".".join(parts)
            bad[full].append(f"{p.relative_to(T)}:{s.count(chr(10), 0, m.start()) + 1}")
    for m in re.finditer(r"(?<![\w/.-])((?:\.\./)*(?:qsync_fx|passes|backend)/[\w/]+\.py)\b", s):
        f = re.sub(r"^(\.\./)+", "", m.group(1))
        if not (T / f).exists():
            bad["FILE " + f].append(f"{p.relative_to(T)}:{s.count(chr(10), 0, m.start()) + 1}")
for k, v in sorted(bad.items()):
    print(k, v[:3])
