import ast
import re
import subprocess
import sys
from pathlib import Path

tree = Path(sys.argv[1])
limit = 140
out = subprocess.run(
    [
        str(tree.resolve() / ".venv/bin/python"),
        "-m",
        "ruff",
        "check",
        "--select",
        "E501",
        "--output-format",
        "concise",
        ".",
    ],
    cwd=tree,
    capture_output=True,
    text=True,
).stdout
for line in reversed(out.splitlines()):
    m = re.match(r"(\S+):(\d+):\d+: E501", line)
    if not m:
        continue
    p = tree / m.group(1)
    L = p.read_text().split("\n")
    i = int(m.group(2)) - 1
    s = L[i]
    tree_ = ast.parse("\n".join(L))
    doc = {
        n
        for x in ast.walk(tree_)
        if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) and isinstance(x.value.value, str)
        for n in range(x.lineno, x.end_lineno + 1)
    }
    if not s.lstrip().startswith("#") and i + 1 not in doc:
        print("LONG CODE", m.group(1), i + 1)
        continue
    ind = re.match(r"\s*(# )?", s).group(0)
    cut = s.rfind(" ", len(ind) + 1, limit)
    L[i : i + 1] = [s[:cut], ind + s[cut + 1 :]]
    p.write_text("\n".join(L))
