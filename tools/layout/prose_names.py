import collections
import re
import sys
from pathlib import Path

T = Path(sys.argv[1])
m = {}
c = collections.Counter()
for l in open(Path(__file__).with_name("symbols.txt")):
    if l.startswith("#") or not l.strip():
        continue
    a, b = l.split()
    old = a.split(":")[1]
    c[old] += 1
    m[old] = b
AMBIG = set(
    "Note Change Cast Read Operator Unit Link Memory Device Held Site Kind Step Sample Run Place Shape Product Window Piece Pass Rule Table Choice Program Whole Entry Search Round switch applied judged Options Bucket Nodes Unit Cause Costs Why State Front Streams Kernels Machine Measured Probe Links Lines Training Random Recording Taken Given Known Asked Seen Found Kept Waiting Reading".split()
)
use = {o: b for o, b in m.items() if c[o] == 1 and o not in AMBIG and not o.startswith("_") and len(o) > 4}
pat = re.compile(r"(?<=`)(" + "|".join(map(re.escape, use)) + r")(?=[`.(])")
n = 0
for p in [
    *T.glob("*.md"),
    *(T / "docs").rglob("*.md"),
    *(T / "qsync_fx").rglob("*.py"),
    *(T / "passes").rglob("*.py"),
    *(T / "backend").rglob("*.py"),
    *(T / "tests").rglob("*.py"),
    *(T / "benchmarks").rglob("*.py"),
    *(T / "examples").rglob("*.py"),
]:
    s = p.read_text()
    r = pat.sub(lambda k: use[k.group(1)], s)
    if r != s:
        p.write_text(r)
        n += 1
print(n, "files of prose")
